/** The server's time as it is now, in signals that change only as often as somebody looks. */

import { signal } from '@preact/signals';

let ahead = 0;

/** Milliseconds since the epoch by the server's clock. */
export const serverNow = (): number => Date.now() + ahead;
/** changes every second */
export const second = signal(Date.now());
/** changes every ten seconds */
export const tenSeconds = signal(Date.now());

export function setServerTime(iso: string): void {
  const apart = Date.parse(iso) - Date.now();
  // Less is the way of the answer, not a wrong clock.
  ahead = Math.abs(apart) > 1500 ? apart : 0;
  second.value = tenSeconds.value = serverNow();
}

let beats = 0;
export function start(): void {
  setInterval(() => {
    second.value = serverNow();
    if (++beats % 10 === 0) tenSeconds.value = second.value;
  }, 1000);
}
