/** What a list of jobs and processes is made of: order, search, tree, places in the queue. Pure. */

import type { JobRow, JobStatus, Row, Status } from '../wire/types';

/** A row with what is worked out once when it arrives. */
export type Item = Row & {
  created: number;
  queued: number | null;
  started: number | null;
  ended: number | null;
  /** the job that it belongs below */
  above: string | null;
  group: Group;
};

/** What the filter bar tells apart. A process that failed, timed out or was lost counts as errored. */
export type Group = JobStatus;
export const GROUPS: readonly Group[] = ['running', 'queued', 'pending', 'completed', 'cancelled', 'errored'];

export function groupOf(status: Status): Group {
  return status === 'failed' || status === 'timed_out' || status === 'lost' ? 'errored' : status;
}

/** The word for a status, as it is shown. */
export const WORDS: Record<Status, string> = {
  pending: 'pending',
  queued: 'queued',
  running: 'running',
  completed: 'completed',
  cancelled: 'cancelled',
  errored: 'errored',
  failed: 'failed',
  timed_out: 'timed out',
  lost: 'lost',
};

const time = (text: string | null) => (text === null ? null : Date.parse(text));

/** `row` itself, with more in it: thousands come at once, and nobody else keeps them. */
export function toItem(row: Row): Item {
  return Object.assign(row, {
    created: Date.parse(row.created_at),
    queued: row.kind === 'job' ? time(row.queued_at) : null,
    started: time(row.started_at),
    ended: time(row.completed_at),
    above: row.kind === 'job' ? row.parent_job_id : row.job_id,
    group: groupOf(row.status),
  });
}

const hays = new WeakMap<Item, string>();

/** What a search looks in, in small letters; made when the first search comes. */
function hayOf(item: Item): string {
  let hay = hays.get(item);
  if (hay === undefined) {
    const more = item.kind === 'job' ? item.agent_id : item.command;
    hay = `${item.subject}\n${more}\n${item.id}\n${item.session_id}\n${item.error ?? ''}`.toLowerCase();
    hays.set(item, hay);
  }
  return hay;
}

export const isOver = (item: Pick<Row, 'status'>) =>
  item.status !== 'running' && item.status !== 'queued' && item.status !== 'pending';
/** Asked to stop and not ended yet. */
export const isCancelling = (item: Pick<Row, 'status' | 'cancel_requested_at'>) =>
  !isOver(item) && item.cancel_requested_at !== null;
/** Ended by force: what ran it was given up and may still be running. */
export const isStuck = (item: Row) => item.kind === 'job' && item.stuck;

/** Milliseconds waited and run, up to `now` where it still does. */
export function spent(item: Item, now: number): { waited: number; ran: number | null } {
  const from = item.queued ?? item.created;
  const waited = (item.started ?? item.ended ?? now) - from;
  const ran = item.started === null ? null : Math.max(0, (item.ended ?? now) - item.started);
  return { waited: Math.max(0, waited), ran };
}

export type Kind = 'all' | 'job' | 'process';

export interface Filter {
  groups: ReadonlySet<Group>;
  kind: Kind;
  session: string;
  query: string;
}

export function matcher(filter: Filter): (item: Item) => boolean {
  const words = filter.query.toLowerCase().split(/\s+/).filter(Boolean);
  return (item) =>
    (filter.groups.size === 0 || filter.groups.has(item.group)) &&
    (filter.kind === 'all' || item.kind === filter.kind) &&
    (filter.session === '' || item.session_id === filter.session) &&
    (words.length === 0 || words.every((word) => hayOf(item).includes(word)));
}

/** How many there are of each status, of those that fit all but the status. */
export function counts(items: Iterable<Item>, filter: Filter): Record<Group, number> {
  const found: Record<Group, number> = { running: 0, queued: 0, pending: 0, completed: 0, cancelled: 0, errored: 0 };
  const fits = matcher({ ...filter, groups: new Set() });
  for (const item of items) if (fits(item)) found[item.group]++;
  return found;
}

export interface Line {
  item: Item;
  depth: number;
  children: number;
  folded: boolean;
  /** it belongs below a job that is not shown above it */
  orphan: boolean;
}

/**
 * The lines of the list: `items` are newest first; children stand in order of creation below their parents.
 *
 * What belongs below a job that is not in the list stands at its own place.
 */
export function lines(items: readonly Item[], fits: (item: Item) => boolean, folded: ReadonlySet<string>): Line[] {
  const shown = items.filter(fits);
  const here = new Set<string>();
  let flat = true;
  for (const item of shown) {
    here.add(item.id);
    flat &&= item.above === null;
  }
  if (flat) return shown.map((item) => ({ item, depth: 0, children: 0, folded: false, orphan: false }));
  const children = new Map<string, Item[]>();
  const roots: Item[] = [];
  for (const item of shown) {
    const above = item.above;
    if (above === null || !here.has(above) || above === item.id) roots.push(item);
    else if (children.has(above)) children.get(above)!.push(item);
    else children.set(above, [item]);
  }
  const result: Line[] = [];
  const done = new Set<string>();
  // A stack of its own: a chain of children may be longer than the call stack is deep.
  const stack: [Item, number][] = [];
  for (const root of roots) {
    stack.push([root, 0]);
    while (stack.length) {
      const [item, depth] = stack.pop()!;
      if (done.has(item.id)) continue;
      done.add(item.id);
      const below = children.get(item.id) ?? [];
      const isFolded = below.length > 0 && folded.has(item.id);
      result.push({ item, depth, children: below.length, folded: isFolded, orphan: depth === 0 && item.above !== null });
      // `below` is newest first, so the oldest is popped first.
      if (!isFolded) for (const child of below) stack.push([child, depth + 1]);
    }
  }
  return result;
}

/** The place of every waiting job in the queue, from 1. A pool is first in, first out. */
export function queuePlaces(items: Iterable<Item>): Map<string, number> {
  const queue: (Item & JobRow)[] = [];
  for (const item of items) if (item.status === 'queued') queue.push(item as Item & JobRow);
  queue.sort((a, b) => (a.queued ?? a.created) - (b.queued ?? b.created) || (a.queue_position ?? 0) - (b.queue_position ?? 0));
  return new Map(queue.map((item, index) => [item.id, index + 1]));
}

/** Where something made at `created` belongs in a list that is newest first; ties keep the order of arrival. */
export function placeOf(list: readonly Item[], created: number): number {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle]!.created > created) low = middle + 1;
    else high = middle;
  }
  return low;
}
