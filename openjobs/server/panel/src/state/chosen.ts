/** The line with the cursor, the lines that are marked, and the dialog that is open. */

import { computed, signal } from '@preact/signals';
import { isOver } from '../pure/items';
import { itemOf, shown } from './live';
import { go, route } from './route';

export const cursor = signal('');
export const marked = signal<ReadonlySet<string>>(new Set());

export type Open =
  | { kind: 'none' }
  | { kind: 'help' }
  | { kind: 'stop'; ids: string[] }
  | { kind: 'spawn'; session: string; again: string | null };
export const dialog = signal<Open>({ kind: 'none' });
export const closeDialog = () => (dialog.value = { kind: 'none' });

export const openId = computed(() => route.value.job || route.value.process);

export function openItem(id: string, replace = false): void {
  const kind = itemOf(id)?.kind ?? 'job';
  go({ job: kind === 'job' ? id : '', process: kind === 'job' ? '' : id, tab: replace ? route.value.tab : '' }, replace);
}

export const closeDrawer = () => go({ job: '', process: '', tab: '' });

/** What c and r are about: the open drawer's, else the line with the cursor. */
export const subjectId = (): string => openId.value || cursor.value;

export function moveCursor(by: number): void {
  const list = shown.value;
  if (list.length === 0) return;
  const at = list.findIndex((line) => line.item.id === cursor.value);
  const next = at < 0 ? (by > 0 ? 0 : list.length - 1) : Math.min(list.length - 1, Math.max(0, at + by));
  cursor.value = list[next]!.item.id;
  if (openId.value) openItem(cursor.value, true);
}

export function toggleMark(id: string): void {
  const next = new Set(marked.value);
  if (!next.delete(id)) next.add(id);
  marked.value = next;
}

export function askStop(): void {
  const ids = marked.value.size ? [...marked.value] : [subjectId()];
  const open = ids.filter((id) => {
    const item = itemOf(id);
    return id && (!item || !isOver(item));
  });
  if (open.length) dialog.value = { kind: 'stop', ids: open };
}

export function askAgain(id = subjectId()): void {
  if (id && itemOf(id)?.kind !== 'process') dialog.value = { kind: 'spawn', session: '', again: id };
}

export function askSpawn(): void {
  dialog.value = { kind: 'spawn', session: route.value.session, again: null };
}
