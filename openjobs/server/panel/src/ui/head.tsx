/** The top of the page: where one is, how many run, and the filters. */

import { useEffect, useState } from 'preact/hooks';
import { count } from '../pure/format';
import { GROUPS, WORDS, type Group } from '../pure/items';
import { askSpawn, dialog, marked } from '../state/chosen';
import { about, line, loadSessions, runningTotal, sessions, shown, statusCounts, tryNow } from '../state/live';
import { canNotify, notifying, toggleNotify } from '../state/notify';
import { go, groups, link, page, route, type View } from '../state/route';
import { second } from '../state/clock';
import { Bell, BellOff, Close, Plus, Question, Search } from './icons';
import { Mark } from './status';
import { askStop } from '../state/chosen';

const TABS: [View, string][] = [['jobs', 'Jobs'], ['timeline', 'Timeline'], ['sessions', 'Sessions']];

export function Head() {
  const here = route.value.view === 'session' ? 'sessions' : route.value.view;
  const n = runningTotal.value;
  return (
    <header class="head">
      <a class="brand" data-go href={link(page('jobs', { status: '', q: '', session: '', kind: '' }))} title={about.value?.home ?? ''}>
        <span class="logo" aria-hidden="true" />openjobs
      </a>
      <nav aria-label="Pages">
        {TABS.map(([view, name]) => (
          <a key={view} data-go href={link(page(view))} aria-current={here === view ? 'page' : undefined}>
            {name}
            {view === 'jobs' && n > 0 && <span class="badge" title={`${n} running`}>{n}<span class="sr"> running</span></span>}
          </a>
        ))}
      </nav>
      <span class="gap" />
      <Connection />
      {canNotify && (
        <button type="button" class="ghost" aria-pressed={notifying.value} onClick={() => void toggleNotify()}
          aria-label="Notify me when something ends" title="Notify me when something ends while I am elsewhere">
          {notifying.value ? <Bell /> : <BellOff />}
        </button>
      )}
      <button type="button" class="ghost help" aria-label="Keyboard help" title="Keyboard help (?)" onClick={() => (dialog.value = { kind: 'help' })}><Question /></button>
      <button type="button" class="primary new" onClick={askSpawn}><Plus /><span>New job</span></button>
    </header>
  );
}

function Connection() {
  const { state } = line.value;
  const word = state === 'open' ? 'live' : state === 'off' ? 'off' : 'connecting';
  return <span class={`connection is-${state}`} title={about.value?.mode === 'attached' ? 'Beside the host that runs the jobs: changes are seen a little later' : 'Changes are shown as they happen'}><i aria-hidden="true" />{word}</span>;
}

/** Says that the line is lost, when it is tried again, and lets that be now. */
export function Lost() {
  const { state, tries, until } = line.value;
  if (tries === 0 || state === 'open' || state === 'off') return null;
  const left = Math.max(0, Math.ceil((until - Math.max(Date.now(), second.value - 1000)) / 1000));
  return (
    <div class="lost">
      <span>
        <strong>The connection is lost.</strong>{' '}
        {state === 'connecting' ? 'Trying again now…' : `What you see may be old. Trying again in ${left}\u00a0s.`}
        {tries > 4 && ' Is the server still running? Start it with “openjobs serve”.'}
      </span>
      <button type="button" onClick={tryNow} disabled={state === 'connecting'}>Try now</button>
    </div>
  );
}

export function Filters() {
  return (
    <div class="filters" role="search" aria-label="Filter the list">
      <div class="find-jobs">
        <Search />
        <label class="sr" for="search">Search in subject, agent, id and error</label>
        <SearchField />
        <kbd aria-hidden="true">/</kbd>
      </div>
      <div class="chips" role="group" aria-label="Status">
        {GROUPS.map((group) => <Chip key={group} group={group} />)}
      </div>
      <span class="gap" />
      <Kinds />
      <SessionChoice />
    </div>
  );
}

/** Typing is not held up by a long list: the filter follows after a moment. */
function SearchField() {
  const [text, setText] = useState(route.value.q);
  useEffect(() => setText(route.value.q), [route.value.q]);
  useEffect(() => {
    if (text === route.peek().q) return;
    const timer = setTimeout(() => go({ q: text }, true), 120);
    return () => clearTimeout(timer);
  }, [text]);
  return <input id="search" type="search" placeholder="Search" autocomplete="off" spellcheck={false} value={text} onInput={(event) => setText(event.currentTarget.value)} />;
}

function Chip({ group }: { group: Group }) {
  const n = statusCounts.value[group];
  const on = groups.value.has(group);
  if (group === 'pending' && n === 0 && !on) return null;
  const toggle = () => {
    const next = new Set(groups.value);
    if (!next.delete(group)) next.add(group);
    go({ status: GROUPS.filter((name) => next.has(name)).join(',') });
  };
  return (
    <button type="button" class={`chip s-${group}`} aria-pressed={on} onClick={toggle}>
      <Mark status={group} word={WORDS[group]} /><span class="n">{n.toLocaleString('en')}</span>
    </button>
  );
}

function Kinds() {
  return (
    <span class="pick">
      <select aria-label="Kind" value={route.value.kind} onChange={(event) => go({ kind: event.currentTarget.value })}>
        <option value="">Jobs and processes</option>
        <option value="job">Jobs</option>
        <option value="process">Processes</option>
      </select>
    </span>
  );
}

function SessionChoice() {
  const ask = () => void loadSessions().catch(() => undefined);
  const chosen = route.value.session;
  const names = (sessions.value ?? []).map((row) => row.session_id);
  if (chosen && !names.includes(chosen)) names.unshift(chosen);
  useEffect(ask, []);
  return (
    <span class="pick">
      <select aria-label="Session" value={chosen} onFocus={ask} onChange={(event) => go({ session: event.currentTarget.value })}>
        <option value="">All sessions</option>
        {names.map((name) => <option key={name} value={name}>{name}</option>)}
      </select>
    </span>
  );
}

/** What can be done with the marked lines. */
export function Marked() {
  const n = marked.value.size;
  if (n === 0) return null;
  const all = () => (marked.value = new Set(shown.value.filter((line) => ['running', 'queued', 'pending'].includes(line.item.status)).map((line) => line.item.id)));
  return (
    <div class="bulk" role="group" aria-label="Marked lines">
      <strong>{count(n, 'line')} marked</strong>
      <button type="button" class="ghost" onClick={all}>Mark all unfinished</button>
      <button type="button" class="danger" onClick={askStop}>Stop…</button>
      <button type="button" class="ghost" onClick={() => (marked.value = new Set())} aria-label="Clear the marks"><Close /></button>
    </div>
  );
}
