/** Messages of a conversation, and the cards that stand for jobs in it. */

import { useEffect } from 'preact/hooks';
import { itemOf } from '../state/live';
import { link, page, route } from '../state/route';
import type { Attach, Message } from '../wire/types';
import { Branch } from './icons';
import { CopyButton, Text } from './parts';
import { Mark, RowMark } from './status';
import { Moment } from './time';

/** so many branches of a message are links; the others are in the list of branches */
const FORKS = 5;
const ROLES: Record<string, string> = { user: 'Prompt', assistant: 'Answer', system: 'System', tool: 'Tool' };

export function Messages({ messages, session, onCheckout }: { messages: Message[]; session: string; onCheckout?: (head: string) => void }) {
  const at = route.value.at;
  const here = messages.some((message) => message.id === at);
  useEffect(() => {
    if (!here) return;
    const element = document.getElementById(`msg-${at}`);
    element?.scrollIntoView({ block: 'center' });
    element?.focus({ preventScroll: true });
  }, [at, here]);
  if (messages.length === 0) return <p class="quiet">No messages yet.</p>;
  return (
    <ol class="messages">
      {messages.map((message) => (
        <li key={message.id} id={`msg-${message.id}`} tabIndex={-1} class={`${message.attach ? 'card' : `from-${message.role}`} ${message.id === at ? 'target' : ''}`}>
          {message.attach ? <AttachCard message={message} attach={message.attach} onCheckout={onCheckout} /> : <Plain message={message} session={session} />}
        </li>
      ))}
    </ol>
  );
}

function Plain({ message, session }: { message: Message; session: string }) {
  return (
    <article aria-label={ROLES[message.role] ?? message.role}>
      <header>
        <strong>{ROLES[message.role] ?? message.role}</strong>
        <span class="quiet"><Moment ms={Date.parse(message.created_at)} /></span>
        {message.job_id && <a data-go href={link({ job: message.job_id, process: '', tab: '' })}>its job</a>}
        <span class="gap" />
        {message.children.length > 1 && (
          <span class="forks">
            <Branch /><span class="sr">Goes on in {message.children.length} branches:</span>
            {message.children.slice(0, FORKS).map((child, index) => <a key={child} data-go href={link(page('session', { session, head: child }))} title={`Branch ${index + 1}`}>{index + 1}</a>)}
            {message.children.length > FORKS && <span>and {message.children.length - FORKS} more</span>}
          </span>
        )}
        <CopyButton text={message.content} what="message" />
      </header>
      <Text html={message.content_html} text={message.content} />
    </article>
  );
}

function AttachCard({ message, attach, onCheckout }: { message: Message; attach: Attach; onCheckout: ((head: string) => void) | undefined }) {
  const now = itemOf(attach.job_id);
  const head = now?.kind === 'job' && now.head_id ? now.head_id : attach.head_id;
  const over = attach.status !== 'running';
  return (
    <article aria-label={`Job ${attach.label ?? attach.job_id}`}>
      <header>
        {now ? <RowMark row={now} /> : <Mark status={attach.status} />}
        <a class="label" data-go href={link({ job: attach.job_id, process: '', tab: '' })} dir="auto">{attach.label || attach.job_id}</a>
        <span class="gap" />
        <span class="quiet"><Moment ms={Date.parse(message.created_at)} /></span>
      </header>
      {over && message.content && (
        <details open={message.content.length < 600}>
          <summary>{attach.status === 'completed' ? 'Result' : 'What came of it'}</summary>
          <Text html={message.content_html} text={message.content} />
        </details>
      )}
      {head !== null && (
        <div class="actions">
          <a class="button small" data-go href={link(page('session', { session: attach.session_id, head }))}><Branch />Show its branch</a>
          {onCheckout && <button type="button" class="small" onClick={() => onCheckout(head)}>Check out its branch</button>}
        </div>
      )}
    </article>
  );
}
