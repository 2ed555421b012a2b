/** All jobs and processes that the page knows, and the line that keeps them true. */

import { batch, computed, signal } from '@preact/signals';
import { count } from '../pure/format';
import { counts, groupOf, isOver, lines, matcher, placeOf, queuePlaces, toItem, WORDS, type Item } from '../pure/items';
import { get, Failure, onLoggedOut, post, said, socketAddress } from '../wire/api';
import { Line, type LineState } from '../wire/socket';
import type { About, Event, JobList, Row, SessionRow } from '../wire/types';
import { setServerTime } from './clock';
import { notifyEnd } from './notify';
import { filter } from './route';
import { note, speak } from './say';

const PAGE = 500;
const FIRST = 200;
const MOST = 20_000;

export type Phase = 'starting' | 'login' | 'failed' | 'ready';
export const phase = signal<Phase>('starting');
export const trouble = signal('');
export const about = signal<About | null>(null);
export const line = signal<{ state: LineState; tries: number; until: number }>({ state: 'connecting', tries: 0, until: 0 });
export const runningTotal = signal(0);
/** whether every job that the server keeps in memory is here */
export const loaded = signal(false);
export const total = signal(0);
export const complete = signal(true);
const firstCounts = signal<JobList['counts']>({});

const byId = new Map<string, { item: Item; seq: number }>();
/** newest first */
let newest: Item[] = [];
const version = signal(0);
export const folded = signal<ReadonlySet<string>>(new Set());
/** newest progress of running jobs */
const progress = signal<ReadonlyMap<string, unknown>>(new Map());
/** grows with each change of a session's jobs: pages that show more than rows read again */
export const touched = signal<{ session: string; id: string; n: number }>({ session: '', id: '', n: 0 });

export const items = computed<readonly Item[]>(() => (version.value, newest));
export const shown = computed(() => lines(items.value, matcher(filter.value), folded.value));
export const places = computed(() => queuePlaces(items.value));
export const statusCounts = computed(() => {
  const here = counts(items.value, filter.value);
  const { session, query, kind } = filter.value;
  if (loaded.value || session || query || kind !== 'all') return here;
  // Until all pages are here the server knows better.
  for (const [status, n] of Object.entries(firstCounts.value)) {
    const group = groupOf(status as Item['status']);
    if (n! > here[group] && group !== 'running' && group !== 'queued' && group !== 'pending') here[group] = n!;
  }
  return here;
});
export const itemOf = (id: string): Item | undefined => (version.value, byId.get(id)?.item);
export const progressOf = (id: string): unknown => progress.value.get(id);

// --- rows -----------------------------------------------------------------------------------------------------

let pending: ReturnType<typeof setTimeout> | undefined;
/** milliseconds that the last drawing of the list's order took */
let cost = 0;

/**
 * Draws at most once a frame, and takes at most a fifth of the time where the list is long. By a timer, which also
 * comes where the page is not seen and has no frames.
 */
function changed(): void {
  pending ??= setTimeout(() => {
    pending = undefined;
    newest = newest.slice();
    const before = performance.now();
    version.value++;
    void [shown.value, statusCounts.value, places.value];
    cost = performance.now() - before;
  }, Math.min(100, Math.max(8, cost * 4)));
}

/** Takes a row as it was at `seq`; false where a newer one is here already. */
function take(row: Row, seq: number): boolean {
  const known = byId.get(row.id);
  if (known) {
    if (known.seq > seq) return false;
    const old = known.item;
    if (row.kind === 'job' && old.kind === 'job' && row.revision < old.revision) return false;
    const item = toItem(row);
    byId.set(row.id, { item, seq });
    const at = newest.indexOf(old, Math.max(0, placeOf(newest, old.created)));
    if (at >= 0) newest[at] = item;
  } else {
    const item = toItem(row);
    byId.set(row.id, { item, seq });
    const at = placeOf(newest, item.created);
    // Pages come newest first: most rows belong at the end or at the beginning.
    if (at === newest.length) newest.push(item);
    else newest.splice(at, 0, item);
  }
  changed();
  return true;
}

function takeEvent(event: Event): void {
  switch (event.event) {
    case 'task_created':
    case 'job_status': {
      const before = byId.get(event.task.id)?.item;
      if (!take(event.task, event.seq)) return;
      const now = event.task;
      if (isOver(now) && (!before || !isOver(before))) ended(now);
      if (before?.cancel_requested_at === null && now.cancel_requested_at !== null && !isOver(now)) {
        speak(`${now.subject || now.id}: asked to stop`);
      }
      touched.value = { session: now.session_id, id: now.id, n: touched.value.n + 1 };
      break;
    }
    case 'task_progress':
      progress.value = new Map(progress.value).set(event.job_id, event.progress);
      break;
    case 'running_task':
      runningTotal.value = event.running_total;
      break;
    case 'snapshot':
      for (const row of event.tasks) take(row, event.seq);
      runningTotal.value = event.running_total;
      // What is on other pages of the list may have changed as well.
      void loadAll();
      touched.value = { session: '', id: '', n: touched.value.n + 1 };
  }
}

function ended(row: Row): void {
  const name = row.subject || row.id;
  speak(`${name}: ${WORDS[row.status]}`);
  notifyEnd(row);
  if (progress.value.has(row.id)) {
    const rest = new Map(progress.value);
    rest.delete(row.id);
    progress.value = rest;
  }
}

// --- the start, and pages of the list ---------------------------------------------------------------------------

let connection: Line | null = null;
let loading = 0;
let lastTotal = -1;

function takeList(list: JobList): void {
  batch(() => {
    for (const row of list.tasks) take(row, list.seq);
    total.value = list.total;
    firstCounts.value = list.counts;
    complete.value = list.complete;
    runningTotal.value = list.running_total;
  });
}

/** Everything that the server has in memory, page by page, in the background. */
async function loadAll(first?: JobList): Promise<void> {
  const mine = ++loading;
  if (!first && lastTotal < 0) loaded.value = false;
  try {
    let list = first ?? (await get<JobList>('jobs', { kind: 'all', limit: PAGE }));
    for (;;) {
      if (mine !== loading) return;
      if (list !== first) takeList(list);
      if (list.next_before === null || newest.length >= MOST) break;
      await breath();
      list = await get<JobList>('jobs', { kind: 'all', limit: PAGE, before: list.next_before });
    }
    loaded.value = true;
    if (!list.complete && list.total > lastTotal) {
      // The server is still reading the home.
      lastTotal = list.total;
      setTimeout(() => mine === loading && void loadAll(), 1000);
    }
  } catch (error) {
    // The line finds out whether the server is gone, and reads the list again when it is back.
    if (mine === loading) trouble.value = said(error);
  }
}

const breath = () => new Promise((done) => setTimeout(done, 0));

export async function start(): Promise<void> {
  onLoggedOut.call = () => (phase.value = 'login');
  const code = new URLSearchParams(location.hash.slice(1)).get('login');
  if (code !== null) {
    history.replaceState(null, '', location.pathname + location.search);
    try {
      await post('login', { code });
    } catch (error) {
      trouble.value = said(error);
      phase.value = 'login';
      return;
    }
  }
  await enter();
}

export async function logIn(token: string): Promise<void> {
  await post('login', { token });
  trouble.value = '';
  await enter();
}

export async function enter(): Promise<void> {
  try {
    const [info, list] = await Promise.all([get<About>('about'), get<JobList>('jobs', { kind: 'all', limit: FIRST })]);
    about.value = info;
    setServerTime(info.now);
    takeList(list);
    version.value++;
    phase.value = 'ready';
    trouble.value = '';
    connect(list);
    void loadAll(list);
  } catch (error) {
    if (error instanceof Failure && error.status === 401) phase.value = 'login';
    else {
      trouble.value = said(error);
      phase.value = 'failed';
    }
  }
}

function connect(list: JobList): void {
  let wasLost = false;
  connection?.close();
  connection = new Line(socketAddress(), { epoch: list.epoch, seq: list.seq, since: about.value?.now ?? null }, {
    event(event) {
      const epoch = about.value?.epoch;
      if (epoch !== undefined && event.epoch !== epoch) {
        // Another life of the server counts from the beginning: what was known is older than all it says.
        about.value = { ...about.value!, epoch: event.epoch };
        for (const known of byId.values()) known.seq = -1;
        void get<About>('about').then((info) => (about.value = info), () => undefined);
      }
      takeEvent(event);
    },
    state(state, tries, wait) {
      line.value = { state, tries, until: Date.now() + wait };
      if (state === 'waiting' && !wasLost && tries >= 1) {
        wasLost = true;
        speak('The connection to the server is lost. Trying again.');
      }
      if (state === 'open' && wasLost) {
        wasLost = false;
        note('Connected again; the list is up to date.');
      }
    },
    async allowed() {
      try {
        await get<About>('about');
        return true;
      } catch (error) {
        return !(error instanceof Failure && error.status === 401);
      }
    },
  });
  connection.open();
}

export function tryNow(): void {
  connection?.now();
}

export function listen(): void {
  addEventListener('online', tryNow);
  document.addEventListener('visibilitychange', () => document.visibilityState === 'visible' && tryNow());
}

// --- what a person does -----------------------------------------------------------------------------------------

/** Asks jobs and processes to stop, and says what came of it. */
export async function stop(ids: readonly string[], reason: string): Promise<void> {
  const why = reason.trim() ? { reason: reason.trim() } : {};
  const jobs = ids.filter((id) => byId.get(id)?.item.kind !== 'process');
  const processes = ids.filter((id) => byId.get(id)?.item.kind === 'process');
  let refused = 0;
  let message = '';
  const one = async (work: Promise<unknown>) => {
    try {
      await work;
    } catch (error) {
      refused++;
      message = said(error);
    }
  };
  if (jobs.length === 1) await one(post(`jobs/${jobs[0]}/cancel`, why));
  for (let at = 0; jobs.length > 1 && at < jobs.length; at += 1000) {
    try {
      const answer = await post<{ results: { error?: { message: string } }[] }>('cancel', { job_ids: jobs.slice(at, at + 1000), ...why });
      for (const result of answer?.results ?? []) if (result.error) (refused++, (message = result.error.message));
    } catch (error) {
      refused += Math.min(1000, jobs.length - at);
      message = said(error);
    }
  }
  for (const id of processes) await one(post(`processes/${id}/stop`, why));
  const asked = ids.length - refused;
  if (asked > 0) note(`Asked ${ids.length === 1 ? nameOf(ids[0]!) : count(asked, 'job')} to stop.`);
  if (refused > 0) note(`${count(refused, 'job')} could not be stopped: ${message}`, true);
}

export const nameOf = (id: string): string => byId.get(id)?.item.subject || id;

export const sessions = signal<SessionRow[] | null>(null);
export async function loadSessions(): Promise<void> {
  sessions.value = (await get<{ sessions: SessionRow[] }>('sessions')).sessions;
}
