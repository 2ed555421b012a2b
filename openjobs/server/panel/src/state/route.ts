/** What is shown is in the query of the address, so that it can be sent, kept and gone back to. */

import { computed, signal } from '@preact/signals';
import { GROUPS, type Filter, type Group, type Kind } from '../pure/items';

export type View = 'jobs' | 'timeline' | 'sessions' | 'session';
const VIEWS: readonly View[] = ['jobs', 'timeline', 'sessions', 'session'];

export interface Route {
  view: View;
  /** the open drawer */
  job: string;
  process: string;
  tab: string;
  /** filters */
  status: string;
  kind: string;
  session: string;
  q: string;
  /** the session page: the branch that is shown, and the message to go to */
  head: string;
  at: string;
  /** the span of the timeline, in minutes */
  span: string;
}

const EMPTY: Route = { view: 'jobs', job: '', process: '', tab: '', status: '', kind: '', session: '', q: '', head: '', at: '', span: '' };

export function parse(search: string): Route {
  const query = new URLSearchParams(search);
  const found: Route = { ...EMPTY };
  for (const name of Object.keys(EMPTY) as (keyof Route)[]) {
    const value = query.get(name);
    if (value !== null && name !== 'view') found[name] = value;
  }
  const view = query.get('view') as View;
  found.view = VIEWS.includes(view) ? view : 'jobs';
  return found;
}

export function toSearch(route: Route): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(route)) {
    if (value !== '' && !(name === 'view' && value === 'jobs')) query.set(name, value);
  }
  const text = query.toString();
  return text ? `?${text}` : '?';
}

export const route = signal<Route>(parse(location.search));

/** The same place with something else about it, as an address for a link. */
export const link = (patch: Partial<Route>): string => toSearch({ ...route.value, ...patch });

export function go(patch: Partial<Route>, replace = false): void {
  const next = { ...route.value, ...patch };
  const search = toSearch(next);
  if (search === toSearch(route.value)) return;
  history[replace ? 'replaceState' : 'pushState'](null, '', search);
  route.value = next;
}

/** A page of its own: the filters stay, what belongs to the old page goes. */
export const page = (view: View, more: Partial<Route> = {}): Partial<Route> => ({
  view, head: '', at: '', job: '', process: '', tab: '', ...more,
});

export function listen(): void {
  addEventListener('popstate', () => (route.value = parse(location.search)));
  // Links of the page change the place without loading anything; with a modifier key they are the browser's.
  document.addEventListener('click', (event) => {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const anchor = (event.target as Element).closest?.('a[data-go]');
    if (!(anchor instanceof HTMLAnchorElement)) return;
    event.preventDefault();
    const search = anchor.getAttribute('href') ?? '?';
    history.pushState(null, '', search);
    route.value = parse(search);
  });
}

export const groups = computed<ReadonlySet<Group>>(
  () => new Set(route.value.status.split(',').filter((name): name is Group => GROUPS.includes(name as Group))),
);

export const filter = computed<Filter>(() => {
  const { kind, session, q } = route.value;
  return { groups: groups.value, kind: kind === 'job' || kind === 'process' ? (kind as Kind) : 'all', session, query: q };
});
