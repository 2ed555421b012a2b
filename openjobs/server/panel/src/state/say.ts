/** What is said to the person: aloud through the one polite region, and as short notes on the screen. */

import { signal } from '@preact/signals';

export const spoken = signal('');
export interface Note {
  id: number;
  text: string;
  bad: boolean;
}
export const notes = signal<Note[]>([]);

let waiting: string[] = [];
let timer: ReturnType<typeof setTimeout> | undefined;
let last = 0;

/** Said by screen readers. Many at once are summed up, so that nobody is talked over. */
export function speak(text: string): void {
  waiting.push(text);
  clearTimeout(timer);
  timer = setTimeout(() => {
    const many = waiting.length > 3 ? `${waiting.length} changes. ${waiting[waiting.length - 1]}` : waiting.join('. ');
    waiting = [];
    // The same text twice would not be read again.
    spoken.value = many === spoken.value ? `${many}\u00a0` : many;
  }, 250);
}

/** Seen for some seconds, and said. */
export function note(text: string, bad = false): void {
  const id = ++last;
  notes.value = [...notes.value.slice(-3), { id, text, bad }];
  speak(text);
  setTimeout(() => dismiss(id), bad ? 12_000 : 5_000);
}

export function dismiss(id: number): void {
  notes.value = notes.value.filter((n) => n.id !== id);
}
