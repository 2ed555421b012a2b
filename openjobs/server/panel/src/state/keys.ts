/** The keyboard: one place that says which key does what. */

import { askAgain, askSpawn, askStop, closeDialog, closeDrawer, cursor, dialog, marked, moveCursor, openId, openItem, toggleMark } from './chosen';
import { go, route } from './route';

export const KEYS: readonly (readonly [string, string])[] = [
  ['/', 'search'],
  ['j', 'next line'],
  ['k', 'line before'],
  ['Enter', 'open the line'],
  ['x', 'mark the line, to stop several at once'],
  ['c', 'stop: the marked lines, else the open job, else the line'],
  ['r', 'run again with another prompt'],
  ['n', 'new job'],
  ['?', 'this help'],
  ['Esc', 'close what is open, clear the marks'],
];

const typing = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))
    && (target as HTMLInputElement).type !== 'checkbox';

export function focusSearch(): void {
  const field = document.querySelector<HTMLInputElement>('.find input, #search');
  field?.focus();
  field?.select();
}

function escape(target: EventTarget | null): void {
  if (dialog.value.kind !== 'none') closeDialog();
  else if (typing(target)) (target as HTMLElement).blur();
  else if (openId.value) closeDrawer();
  else if (marked.value.size) marked.value = new Set();
  else if (route.value.q || route.value.status) go({ q: '', status: '' });
}

export function listen(): void {
  addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === 'Escape') {
      event.preventDefault();
      escape(event.target);
      return;
    }
    if (dialog.value.kind !== 'none' || typing(event.target)) return;
    const done = act(event.key, event.target);
    if (done) event.preventDefault();
  });
}

function act(key: string, target: EventTarget | null): boolean {
  const element = target instanceof Element ? target : null;
  const elsewhere = element?.closest('[role=tablist], .log-text, .scrolls') != null;
  const list = route.value.view === 'jobs' || route.value.view === 'timeline';
  if (!list && 'jkx'.includes(key)) return false;
  switch (key) {
    case '/': focusSearch(); return true;
    case '?': dialog.value = { kind: 'help' }; return true;
    case 'n': askSpawn(); return true;
    case 'c': askStop(); return true;
    case 'r': askAgain(); return true;
    case 'x': if (cursor.value) toggleMark(cursor.value); return true;
    case 'j': moveCursor(1); return true;
    case 'k': moveCursor(-1); return true;
    case 'ArrowDown': if (elsewhere || !element?.closest('.list')) return false; moveCursor(1); return true;
    case 'ArrowUp': if (elsewhere || !element?.closest('.list')) return false; moveCursor(-1); return true;
    case 'Enter':
      // A link or button with the focus does its own work.
      if (!cursor.value || element?.closest('a, button, summary, input')) return false;
      openItem(cursor.value);
      return true;
    default: return false;
  }
}
