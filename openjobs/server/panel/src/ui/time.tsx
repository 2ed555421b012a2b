import { age, duration, moment, wholeMoment } from '../pure/format';
import { spent, type Item } from '../pure/items';
import { second, serverNow, tenSeconds } from '../state/clock';

/** How long ago, kept true. */
export function Age({ ms }: { ms: number }) {
  // By the second while it is young; later a look now and then is enough.
  const now = Math.max(serverNow() - ms < 70_000 ? second.value : tenSeconds.value, ms);
  return <time dateTime={new Date(ms).toISOString()} title={wholeMoment(ms)}>{age(now - ms)}</time>;
}

export function Moment({ ms }: { ms: number }) {
  return <time dateTime={new Date(ms).toISOString()} title={wholeMoment(ms)}>{moment(ms, serverNow())}</time>;
}

/** How long it ran, or waits; ticks while it goes on. */
export function Spent({ item }: { item: Item }) {
  const ticking = item.ended === null;
  const now = ticking ? Math.max(second.value, serverNow()) : 0;
  const { waited, ran } = spent(item, now);
  if (ran !== null) return <span class={ticking ? 'ticking' : ''}>{duration(ran, ticking)}</span>;
  if (!ticking) return <span class="quiet">–</span>;
  return <span class="quiet">waits {waited < 60_000 ? duration(waited, true) : age(waited)}</span>;
}
