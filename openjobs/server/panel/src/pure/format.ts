/** Times and amounts as people read them. Pure; milliseconds since the epoch throughout. */

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

/** `0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `4 d 3 h`; whole seconds where it ticks. */
export function duration(ms: number, ticking = false): string {
  if (!(ms >= 0)) ms = 0;
  if (ms < 10 * SECOND && !ticking) return `${(ms / SECOND).toFixed(1)} s`;
  if (ms < MINUTE) return `${Math.floor(ms / SECOND)} s`;
  if (ms < HOUR) return `${Math.floor(ms / MINUTE)} min ${two(Math.floor((ms % MINUTE) / SECOND))} s`;
  if (ms < DAY) return `${Math.floor(ms / HOUR)} h ${two(Math.floor((ms % HOUR) / MINUTE))} min`;
  return `${Math.floor(ms / DAY)} d ${Math.floor((ms % DAY) / HOUR)} h`;
}

/** `now`, `40 s`, `3 min`, `2 h`, `5 d`: how long ago, in one unit. */
export function age(ms: number): string {
  if (!(ms >= 2 * SECOND)) return 'now';
  if (ms < MINUTE) return `${Math.floor(ms / SECOND)} s`;
  if (ms < HOUR) return `${Math.floor(ms / MINUTE)} min`;
  if (ms < DAY) return `${Math.floor(ms / HOUR)} h`;
  return `${Math.floor(ms / DAY)} d`;
}

const clockTime = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const dayTime = new Intl.DateTimeFormat(undefined, {
  ...({ month: 'short', day: 'numeric', hour: '2-digit', minute: '2-digit', second: '2-digit' } as const),
});
const full = new Intl.DateTimeFormat(undefined, { dateStyle: 'full', timeStyle: 'long' });

/** The time of day, with the date where it is not today's. */
export function moment(ms: number, now: number): string {
  const same = new Date(ms).toDateString() === new Date(now).toDateString();
  return (same ? clockTime : dayTime).format(ms);
}

export function wholeMoment(ms: number): string {
  return full.format(ms);
}

/** `812 B`, `4.1 KB`, `2.0 MB` */
export function bytes(n: number): string {
  if (n < 1000) return `${n} B`;
  for (const unit of ['KB', 'MB', 'GB']) {
    n /= 1000;
    if (n < 1000) return `${n < 10 ? n.toFixed(1) : Math.round(n)} ${unit}`;
  }
  return `${Math.round(n)} TB`;
}

export function count(n: number, one: string, many = `${one}s`): string {
  return `${n.toLocaleString('en')} ${n === 1 ? one : many}`;
}

/** The first block of an id: what people use to name it. */
export function short(id: string): string {
  return id.length > 12 ? id.slice(0, 8) : id;
}

function two(n: number): string {
  return String(n).padStart(2, '0');
}
