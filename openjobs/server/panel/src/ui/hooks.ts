import { signal } from '@preact/signals';
import type { RefObject } from 'preact';
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { windowOf, type Window } from '../pure/window';
import { Failure, said } from '../wire/api';

const query = matchMedia('(max-width: 720px)');
/** whether the page is as narrow as a phone */
export const narrow = signal(query.matches);
query.addEventListener('change', () => (narrow.value = query.matches));
const middle = matchMedia('(max-width: 1180px)');
/** whether an open drawer covers the list */
export const covered = signal(middle.matches);
middle.addEventListener('change', () => (covered.value = middle.matches));

/** Which of `count` equally high rows of a scrolling element need to exist. */
export function useWindow(count: number, rowHeight: number): { scroller: RefObject<HTMLDivElement | null>; seen: Window } {
  const scroller = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 900 });
  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element) return;
    // By steps of rows: a smaller move needs no other rows.
    const look = () => {
      const top = Math.floor(element.scrollTop / rowHeight) * rowHeight;
      const height = element.clientHeight;
      setView((old) => (old.top === top && old.height === height ? old : { top, height }));
    };
    look();
    element.addEventListener('scroll', look, { passive: true });
    const resized = new ResizeObserver(look);
    resized.observe(element);
    return () => (element.removeEventListener('scroll', look), resized.disconnect());
  }, [rowHeight]);
  return { scroller, seen: windowOf(count, rowHeight, view.top, view.height + rowHeight) };
}

export interface Loaded<T> {
  value: T | null;
  error: string;
  code: string;
  busy: boolean;
  again(): void;
}

/**
 * What `read` gives, read again when `key` changes, and when `fresh` does: then what was there stays until the
 * new is here.
 */
export function useLoaded<T>(key: string, fresh: unknown, read: (signal: AbortSignal) => Promise<T>): Loaded<T> {
  const [state, setState] = useState<{ key: string; value: T | null; error: string; code: string; busy: boolean }>({
    key, value: null, error: '', code: '', busy: true,
  });
  const [tries, setTries] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    setState((old) => (old.key === key ? { ...old, busy: true } : { key, value: null, error: '', code: '', busy: true }));
    read(stop.signal).then(
      (value) => stop.signal.aborted || setState({ key, value, error: '', code: '', busy: false }),
      (error: unknown) => {
        if (stop.signal.aborted) return;
        const code = error instanceof Failure ? error.code : 'failed';
        setState((old) => ({ ...old, error: said(error), code, busy: false }));
      },
    );
    return () => stop.abort();
  }, [key, fresh, tries]);
  const current = state.key === key ? state : { value: null, error: '', code: '', busy: true };
  return { ...current, again: () => setTries((n) => n + 1) };
}
