/** Notifications of the system when something ends, where the person asked for them. */

import { signal } from '@preact/signals';
import { WORDS } from '../pure/items';
import type { Row } from '../wire/types';
import { note } from './say';

const KEY = 'openjobs.notify';
export const canNotify = 'Notification' in window;
export const notifying = signal(canNotify && Notification.permission === 'granted' && stored() === 'yes');

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden; then the choice lasts as long as the page
  }
}

export async function toggleNotify(): Promise<void> {
  if (!canNotify) return;
  let on = !notifying.value;
  if (on && Notification.permission !== 'granted' && (await Notification.requestPermission()) !== 'granted') {
    on = false;
    note('The browser does not allow notifications for this page. Allow them in its site settings.', true);
    return;
  }
  notifying.value = on;
  try {
    localStorage.setItem(KEY, on ? 'yes' : 'no');
  } catch {
    // As above.
  }
  note(on ? 'You will be notified when something ends while you are elsewhere.' : 'Notifications are off.');
}

export function notifyEnd(row: Row): void {
  if (!notifying.value || (document.visibilityState === 'visible' && document.hasFocus())) return;
  try {
    const message = new Notification(row.subject || row.id, { body: WORDS[row.status], tag: row.id });
    message.onclick = () => {
      window.focus();
      message.close();
    };
  } catch {
    // Some phones allow notifications from service workers only.
  }
}
