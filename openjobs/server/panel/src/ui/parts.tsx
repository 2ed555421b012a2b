import type { ComponentChildren } from 'preact';
import { useEffect, useRef, useState } from 'preact/hooks';
import { note } from '../state/say';
import { Check, Close, Copy } from './icons';

/**
 * HTML that the server made from Markdown and sanitised (fields that end in `_html`). The only place of the panel
 * that puts HTML into the page.
 */
export function SafeHtml({ html }: { html: string }) {
  return <div class="prose" dangerouslySetInnerHTML={{ __html: html }} />;
}

/** A text with its rendered form where there is one. */
export function Text({ html, text }: { html: string | null; text: string }) {
  return html !== null ? <SafeHtml html={html} /> : <pre class="plain">{text}</pre>;
}

export async function toClipboard(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages without https have no clipboard; this old way still works there.
    const area = document.createElement('textarea');
    area.value = text;
    area.className = 'sr';
    document.body.append(area);
    area.select();
    const good = document.execCommand('copy');
    area.remove();
    return good;
  }
}

export function CopyButton({ text, what }: { text: string; what: string }) {
  const [done, setDone] = useState(false);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async () => {
    const good = await toClipboard(text);
    note(good ? `Copied the ${what}.` : 'The browser does not allow copying here.', !good);
    setDone(good);
    timer.current = setTimeout(() => setDone(false), 1500);
  };
  return (
    <button type="button" class="ghost small" onClick={copy} aria-label={`Copy the ${what}`} title={`Copy the ${what}`}>
      {done ? <Check /> : <Copy />}
    </button>
  );
}

/** A modal dialog; Esc and a click beside it close it, and the focus goes back to where it was. */
export function Dialog(props: { title: string; onClose: () => void; children: ComponentChildren; wide?: boolean }) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const back = document.activeElement as HTMLElement | null;
    ref.current?.showModal();
    return () => {
      if (back?.isConnected) back.focus();
    };
  }, []);
  return (
    <dialog ref={ref} class={props.wide ? 'wide' : ''} aria-labelledby="dialog-title"
      onCancel={(event) => (event.preventDefault(), props.onClose())}
      onPointerDown={(event) => event.target === ref.current && props.onClose()}>
      <div class="dialog-body">
        <header>
          <h2 id="dialog-title">{props.title}</h2>
          <button type="button" class="ghost" onClick={props.onClose} aria-label="Close"><Close /></button>
        </header>
        {props.children}
      </div>
    </dialog>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

/** An error, what to do, and a button that tries again. */
export function Failed({ what, error, again }: { what: string; error: string; again?: () => void }) {
  return (
    <div class="box bad">
      <p><strong>{what}</strong> {error}</p>
      {again && <button type="button" onClick={again}>Try again</button>}
    </div>
  );
}
