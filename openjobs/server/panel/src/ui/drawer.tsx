/** One job or process, whole. Its address can be sent: `?job=ID`, `?process=ID`. */

import { useEffect, useRef } from 'preact/hooks';
import { duration, short } from '../pure/format';
import { isCancelling, isOver, isStuck, toItem, WORDS } from '../pure/items';
import { askAgain, closeDrawer, dialog, openId, openItem } from '../state/chosen';
import { itemOf, progressOf, touched } from '../state/live';
import { go, link, page, route } from '../state/route';
import { get, part } from '../wire/api';
import type { Commit, Conversation, JobRow, WholeJob, WholeProcess } from '../wire/types';
import { covered, useLoaded } from './hooks';
import { Again, Branch, Card, Close, Square, Warn } from './icons';
import { Log } from './log';
import { Messages } from './messages';
import { CopyButton, Failed, Text } from './parts';
import { Mark, RowMark, STUCK_TEXT } from './status';
import { Moment, Spent } from './time';

export function Drawer() {
  const id = openId.value;
  if (!id) return null;
  return route.value.process ? <ProcessDrawer id={id} key={id} /> : <JobDrawer id={id} key={id} />;
}

/** Counts up when something happened to `id`, so that its page is read again. */
function useNews(id: string, whole: string): number {
  const n = useRef(0);
  const change = touched.value;
  if (change.id === id || change.id === whole || change.session === '') n.current = change.n;
  return n.current;
}

function Frame(props: { name: string; children: preact.ComponentChildren; head: preact.ComponentChildren }) {
  const ref = useRef<HTMLElement>(null);
  useEffect(() => {
    // The focus follows Enter and clicks into the drawer, but stays in the list for j and k.
    const inList = document.activeElement?.closest('.list tr.at a') && route.value.tab !== '';
    if (!inList) ref.current?.querySelector<HTMLElement>('h2')?.focus({ preventScroll: true });
    return () => {
      const back = document.getElementById(`row-${props.name}`);
      if (document.activeElement === document.body || ref.current?.contains(document.activeElement)) back?.focus({ preventScroll: true });
    };
  }, []);
  return (
    <aside ref={ref} class={`drawer ${covered.value ? 'over' : ''}`} aria-label="Details">
      <header>
        {props.head}
        <button type="button" class="ghost close" onClick={closeDrawer} aria-label="Close the details" title="Close (Esc)"><Close /></button>
      </header>
      {props.children}
    </aside>
  );
}

const TABS: Record<string, string> = { overview: 'Overview', log: 'Log', conversation: 'Conversation', history: 'History' };

function Tabs({ names, current }: { names: string[]; current: string }) {
  const move = (event: KeyboardEvent) => {
    const by = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0;
    if (!by) return;
    event.preventDefault();
    const next = names[(names.indexOf(current) + by + names.length) % names.length]!;
    go({ tab: next }, true);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="Details" onKeyDown={move}>
      {names.map((name) => (
        <button key={name} type="button" role="tab" id={`tab-${name}`} aria-selected={name === current} aria-controls="tab-panel"
          tabIndex={name === current ? 0 : -1} onClick={() => go({ tab: name }, true)}>{TABS[name]}</button>
      ))}
    </div>
  );
}

function JobDrawer({ id }: { id: string }) {
  const known = itemOf(id);
  const news = useNews(id, known?.id ?? id);
  const read = useLoaded(id, news, (signal) => get<WholeJob>(`jobs/${part(id)}`, {}, signal));
  const job = read.value;
  // The row of the list may be newer than what was read.
  const row = (known?.kind === 'job' ? known : null) ?? job;
  // The beginning of an id will do in an address; from then on it is the whole one.
  useEffect(() => {
    if (job !== null && job.id !== id) go({ job: job.id }, true);
  }, [job?.id]);
  const running = row !== null && row.status === 'running';
  // What a running job has said so far is not an event: it is asked for while somebody looks.
  useEffect(() => {
    if (!running) return;
    const timer = setInterval(read.again, 2000);
    return () => clearInterval(timer);
  }, [running]);
  if (row === null) {
    return (
      <Frame name={id} head={<h2 tabIndex={-1}>{read.error ? 'Not found' : 'Reading…'}</h2>}>
        {read.error && (
          <div class="scrolls pad">
            <Failed what={`No job ${short(id)} can be shown.`} error={read.error} again={read.again} />
            <p>Search for it in the list, or look on the command line with <code>openjobs show {short(id)}</code>.</p>
          </div>
        )}
      </Frame>
    );
  }
  const tabs = ['overview', ...(row.run_id !== null ? ['log'] : []), 'conversation', 'history'];
  const tab = tabs.includes(route.value.tab) ? route.value.tab : 'overview';
  return (
    <Frame name={row.id} head={<h2 tabIndex={-1} dir="auto">{row.subject || row.id}</h2>}>
      <div class="facts">
        <RowMark row={row} />
        <span><Spent item={known ?? toItem(row)} /></span>
        <span class="mono">{short(row.job_id)}<CopyButton text={row.job_id} what="id" /></span>
        <a data-go href={link(page('session', { session: row.session_id, head: row.head_id ?? '' }))} title="The whole conversation">{row.session_id}</a>
        <span>{row.agent_id}</span>
      </div>
      <div class="actions">
        {!isOver(row) && (
          <button type="button" class="danger" disabled={isCancelling(row) || undefined} onClick={() => (dialog.value = { kind: 'stop', ids: [row.id] })}>
            <Square />{isCancelling(row) ? 'Cancelling…' : 'Stop…'}
          </button>
        )}
        <button type="button" onClick={() => askAgain(row.id)}><Again />Run again…</button>
        {row.attach_id !== null && (
          <a class="button" data-go href={link(page('session', { session: row.caller_session_id ?? row.session_id, at: row.attach_id, head: row.parent_msg_id ?? 'root' }))}><Card />Its card</a>
        )}
        {row.head_id !== null && (
          <a class="button" data-go href={link(page('session', { session: row.session_id, head: row.head_id }))}><Branch />Its branch</a>
        )}
      </div>
      <Tabs names={tabs} current={tab} />
      <div class={`panel ${tab === 'log' ? '' : 'scrolls'}`} role="tabpanel" id="tab-panel" aria-labelledby={`tab-${tab}`} tabIndex={tab === 'log' ? -1 : 0}>
        {read.error && read.code !== 'unreachable' && tab !== 'log' && <Failed what="The details cannot be read." error={read.error} again={read.again} />}
        {tab === 'overview' && <Overview row={row} job={job} />}
        {tab === 'log' && <Log id={row.job_id} />}
        {tab === 'conversation' && <JobConversation row={row} />}
        {tab === 'history' && <History id={row.job_id} news={news} />}
      </div>
    </Frame>
  );
}

function Overview({ row, job }: { row: JobRow; job: WholeJob | null }) {
  const error = job?.error ?? row.error;
  const progress = progressOf(row.id);
  return (
    <>
      {isStuck(row) && (
        <div class="box warn" role="note"><Warn /><p><strong>It was {STUCK_TEXT}.</strong> Its code did not react in time and was given up; what it still does is not recorded.{row.cancel_reason ? ` Reason of the stop: ${row.cancel_reason}` : ''}</p></div>
      )}
      {isCancelling(row) && (
        <div class="box"><p><strong>Cancelling…</strong> It was asked to stop{row.cancel_reason ? ` (${row.cancel_reason})` : ''} and has not ended yet.</p></div>
      )}
      {error !== null && row.status !== 'completed' && !isStuck(row) && (
        <section class="box bad" aria-label="Error"><h3>Error <CopyButton text={error} what="error" /></h3><pre class="plain">{error}</pre></section>
      )}
      {row.status === 'cancelled' && !isStuck(row) && (
        <div class="box"><p><strong>Cancelled.</strong> {row.cancel_reason ? `Reason: ${row.cancel_reason}` : 'No reason was given.'}</p></div>
      )}
      {progress !== undefined && <section><h3>Progress</h3><pre class="plain">{typeof progress === 'string' ? progress : JSON.stringify(progress, null, 1)}</pre></section>}
      {job === null ? <p class="quiet">Reading…</p> : (
        <>
          {job.result_text ? (
            <section aria-label="Result">
              <h3>{row.status === 'completed' ? 'Result' : 'Partial result'} <CopyButton text={job.result_text} what="result" /></h3>
              <Text html={job.result_html} text={job.result_text} />
            </section>
          ) : job.partial_result ? (
            <section aria-label="So far"><h3>So far</h3><Text html={job.partial_html} text={job.partial_result} /></section>
          ) : row.status === 'completed' ? <section><h3>Result</h3><p class="quiet">It ended without a text.</p></section> : null}
          <section aria-label="Prompt">
            <h3>Prompt <CopyButton text={job.prompt} what="prompt" /></h3>
            <pre class="plain prompt" dir="auto">{job.prompt}</pre>
          </section>
          {(job.parent || job.child_jobs.length > 0) && (
            <section aria-label="Family">
              <h3>{job.parent ? 'Started by' : 'It started'}</h3>
              <ul class="family">
                {job.parent && <Relative row={job.parent} />}
                {job.parent && job.child_jobs.length > 0 && <li class="sub"><h3>It started</h3></li>}
                {job.child_jobs.map((child) => <Relative key={child.id} row={child} />)}
              </ul>
            </section>
          )}
        </>
      )}
      <Details row={row} job={job} />
    </>
  );
}

function Relative({ row }: { row: JobRow }) {
  const now = itemOf(row.id) ?? row;
  return <li><RowMark row={now} /><a data-go href={link({ job: row.id, process: '', tab: '' })} dir="auto">{row.subject || row.id}</a></li>;
}

const at = (text: string | null) => (text === null ? null : <Moment ms={Date.parse(text)} />);

function Details({ row, job }: { row: JobRow; job: WholeJob | null }) {
  const facts: [string, preact.ComponentChildren][] = [
    ['Created', at(row.created_at)],
    ['Started', at(row.started_at)],
    ['Ended', at(row.completed_at)],
    ['Asked to stop', at(row.cancel_requested_at)],
    ['Id', <span class="mono wide-id">{row.job_id}</span>],
    ['Context', job?.context_mode === 'clean' ? 'clean: a new conversation' : job ? 'inherits the conversation' : null],
    ['Time limit', row.timeout_s === null ? null : duration(row.timeout_s * 1000)],
    ['Usage', job?.usage && Object.keys(job.usage).length ? <code>{JSON.stringify(job.usage)}</code> : null],
    ['Metadata', job?.metadata && Object.keys(job.metadata).length ? <code>{JSON.stringify(job.metadata)}</code> : null],
  ];
  return (
    <section aria-label="Facts">
      <h3>Facts</h3>
      <dl>{facts.filter(([, value]) => value !== null && value !== undefined && value !== '').map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
    </section>
  );
}

function JobConversation({ row }: { row: JobRow }) {
  const read = useLoaded(`${row.session_id} ${row.head_id}`, row.status, (signal) =>
    get<Conversation>(`sessions/${part(row.session_id)}/conversation`, { head: row.head_id ?? row.parent_msg_id, limit: 50 }, signal));
  if (read.error) return <Failed what="The conversation cannot be read." error={read.error} again={read.again} />;
  if (!read.value) return <p class="quiet">Reading…</p>;
  return (
    <>
      {row.head_id === null && <p class="quiet">{isOver(row) ? 'It ended without a message of its own; this is where it began.' : 'It has no message of its own yet; this is where it begins.'}</p>}
      {read.value.more_before && <p><a data-go href={link(page('session', { session: row.session_id, head: row.head_id ?? row.parent_msg_id ?? '' }))}>Earlier messages are on the session’s page</a></p>}
      <Messages messages={read.value.messages} session={row.session_id} />
    </>
  );
}

function History({ id, news }: { id: string; news: number }) {
  const read = useLoaded(id, news, (signal) => get<{ commits: Commit[] }>(`jobs/${part(id)}/history`, {}, signal));
  if (read.error) return <Failed what="The history cannot be read." error={read.error} again={read.again} />;
  if (!read.value) return <p class="quiet">Reading…</p>;
  const commits = read.value.commits;
  return (
    <>
      <p class="quiet">Every state of this job is one commit in the git repository of its session.</p>
      <ol class="commits">
        {commits.map((commit, index) => {
          const before = commits[index - 1];
          return (
            <li key={commit.commit_id}>
              {commit.kind === 'cancel-request' ? <Mark status="cancelled" word="stop requested" /> : commit.status ? <Mark status={commit.status} word={WORDS[commit.status]} /> : <span>{commit.kind}</span>}
              <span class="when">{at(commit.time)}{before && <span class="quiet"> +{duration(Date.parse(commit.time) - Date.parse(before.time))}</span>}</span>
              <span class="mono">{commit.commit_id.slice(0, 10)}<CopyButton text={commit.commit_id} what="commit id" /></span>
              <span class="quiet said">{commit.subject}</span>
            </li>
          );
        })}
      </ol>
    </>
  );
}

function ProcessDrawer({ id }: { id: string }) {
  const known = itemOf(id);
  const news = useNews(id, known?.id ?? id);
  const read = useLoaded(id, news, (signal) => get<WholeProcess>(`processes/${part(id)}`, {}, signal));
  const row = (known?.kind === 'process' ? known : null) ?? read.value;
  if (row === null) {
    return (
      <Frame name={id} head={<h2 tabIndex={-1}>{read.error ? 'Not found' : 'Reading…'}</h2>}>
        {read.error && <div class="scrolls pad"><Failed what={`No process ${short(id)} can be shown.`} error={read.error} again={read.again} /></div>}
      </Frame>
    );
  }
  const tab = route.value.tab === 'overview' ? 'overview' : 'log';
  const whole = read.value;
  return (
    <Frame name={row.id} head={<h2 tabIndex={-1} class="mono" dir="auto">{row.subject || row.id}</h2>}>
      <div class="facts">
        <RowMark row={row} />
        <span><Spent item={known ?? toItem(row)} /></span>
        {row.exit_code !== null && <span>exit code {row.exit_code}</span>}
        {row.signal !== null && <span>signal {row.signal}</span>}
        <span class="mono">{short(row.task_id)}<CopyButton text={row.task_id} what="id" /></span>
        <span>{row.session_id}</span>
      </div>
      <div class="actions">
        {!isOver(row) && (
          <button type="button" class="danger" disabled={isCancelling(row) || undefined} onClick={() => (dialog.value = { kind: 'stop', ids: [row.id] })}>
            <Square />{isCancelling(row) ? 'Stopping…' : 'Stop…'}
          </button>
        )}
        {row.job_id !== null && <button type="button" onClick={() => openItem(row.job_id!)}>The job that started it</button>}
      </div>
      <Tabs names={['log', 'overview']} current={tab} />
      <div class={`panel ${tab === 'log' ? '' : 'scrolls'}`} role="tabpanel" id="tab-panel" aria-labelledby={`tab-${tab}`} tabIndex={tab === 'log' ? -1 : 0}>
        {tab === 'log' ? <Log id={row.task_id} /> : (
          <>
            {row.error !== null && <section class="box bad"><h3>Error</h3><pre class="plain">{row.error}</pre></section>}
            <section><h3>Command <CopyButton text={row.command} what="command" /></h3><pre class="plain">{row.command}</pre></section>
            <section><h3>Facts</h3><dl>
              {([['Started', at(row.started_at)], ['Ended', at(row.completed_at)], ['Asked to stop', at(row.cancel_requested_at)], ['Reason', row.cancel_reason],
                ['Process id', row.pid], ['Directory', whole?.cwd], ['Id', <span class="mono wide-id">{row.task_id}</span>]] as [string, preact.ComponentChildren][])
                .filter(([, value]) => value !== null && value !== undefined)
                .map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}
            </dl></section>
          </>
        )}
      </div>
    </Frame>
  );
}
