/** All sessions, and the page of one: its conversation with branches and cards. */

import { useEffect, useState } from 'preact/hooks';
import { count } from '../pure/format';
import { groupOf, GROUPS } from '../pure/items';
import { askSpawn } from '../state/chosen';
import { touched } from '../state/live';
import { go, link, page, route } from '../state/route';
import { note } from '../state/say';
import { get, part, post, said } from '../wire/api';
import type { Conversation, Message, SessionRow, Status } from '../wire/types';
import { useLoaded } from './hooks';
import { Branch, Card } from './icons';
import { Messages } from './messages';
import { Empty, Failed } from './parts';
import { Mark } from './status';
import { Age, Moment } from './time';

/** Changes at most every `ms` while things happen. */
function useSlow(value: number, ms: number): number {
  const [slow, setSlow] = useState(value);
  useEffect(() => {
    if (slow === value) return;
    const timer = setTimeout(() => setSlow(value), ms);
    return () => clearTimeout(timer);
  }, [slow === value, value - (value % 1)]);
  return slow;
}

export function Sessions() {
  const news = useSlow(touched.value.n, 800);
  const read = useLoaded('sessions', news, (signal) => get<{ sessions: SessionRow[] }>('sessions', {}, signal));
  const rows = read.value?.sessions;
  return (
    <div class="page scrolls">
      <h1>Sessions</h1>
      {read.error && <Failed what="The sessions cannot be read." error={read.error} again={read.again} />}
      {rows?.length === 0 && <Empty title="No sessions yet"><p>A session is made with its first job.</p><button type="button" class="primary" onClick={askSpawn}>New job</button></Empty>}
      {!rows && !read.error && <p class="quiet">Reading…</p>}
      {rows && rows.length > 0 && (
        <table class="plain-table">
          <thead><tr><th scope="col">Session</th><th scope="col">Jobs</th><th scope="col" class="num">Changed</th></tr></thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.session_id}>
                <td>
                  <a data-go class="label" href={link(page('session', { session: row.session_id }))}>{row.title || row.session_id}</a>
                  {row.title && <span class="quiet"> {row.session_id}</span>}
                  {row.damaged !== null && <p class="bad">Cannot be read: {row.damaged}</p>}
                </td>
                <td><Counts counts={row.counts ?? {}} session={row.session_id} /></td>
                <td class="num">{row.changed_at && <Age ms={Date.parse(row.changed_at)} />}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}

function Counts({ counts, session }: { counts: Partial<Record<Status, number>>; session: string }) {
  const sum = new Map<string, number>();
  for (const [status, n] of Object.entries(counts)) sum.set(groupOf(status as Status), (sum.get(groupOf(status as Status)) ?? 0) + n!);
  return (
    <span class="counts">
      {GROUPS.filter((group) => sum.get(group)).map((group) => (
        <a key={group} data-go class="count" href={link(page('jobs', { session, status: group, q: '' }))}><Mark status={group} word={`${sum.get(group)}`} /><span class="sr"> {group}</span></a>
      ))}
    </span>
  );
}

export function Session() {
  const { session, head, at } = route.value;
  const change = touched.value;
  const [relevant, setRelevant] = useState(0);
  useEffect(() => {
    if (change.session === session || change.session === '') setRelevant(change.n);
  }, [change.n]);
  const news = useSlow(relevant, 300);
  const read = useLoaded(`${session} ${head}`, news, async (signal) => {
    const path = `sessions/${part(session)}/conversation`;
    const asked = await get<Conversation>(path, { head, limit: 200 }, signal);
    if (!at || asked.messages.some((message) => message.id === at)) return asked;
    // Where a card is asked for, the branch that is checked out may have it, with all that follows.
    const whole = await get<Conversation>(path, { limit: 200 }, signal);
    return whole.messages.some((message) => message.id === at) ? whole : asked;
  });
  const [older, setOlder] = useState<{ key: string; messages: Message[]; before: string | null }>({ key: '', messages: [], before: null });
  const shown = read.value;
  const key = shown ? `${session} ${shown.head_id} ${shown.more_before}` : '';
  const earlier = older.key === key ? older : null;
  const before = earlier ? earlier.before : (shown?.more_before ?? null);

  const showOlder = async () => {
    try {
      const answer = await get<Conversation>(`sessions/${part(session)}/conversation`, { head: shown!.head_id ?? 'root', before, limit: 200 });
      setOlder({ key, messages: [...answer.messages, ...(earlier?.messages ?? [])], before: answer.more_before });
    } catch (error) {
      note(`Earlier messages cannot be read: ${said(error)}`, true);
    }
  };
  const checkOut = async (node: string) => {
    try {
      await post(`sessions/${part(session)}/checkout`, { node_id: node });
      note('Checked out: the conversation goes on from this branch.');
      if (route.value.head === node) read.again();
      else go({ head: node, at: '' });
    } catch (error) {
      note(`It was not checked out: ${said(error)}`, true);
    }
  };

  const isHead = shown !== null && shown.head_id === shown.session_head_id;
  return (
    <div class="page session">
      <div class="session-head">
        <h1 dir="auto">{shown?.title || session}</h1>
        <a data-go href={link(page('jobs', { session, status: '', q: '' }))}>Its jobs</a>
        <button type="button" class="small" onClick={askSpawn}>New job here</button>
      </div>
      {read.error && <Failed what="The conversation cannot be read." error={read.error} again={read.again} />}
      {!shown && !read.error && <p class="quiet">Reading…</p>}
      {shown && (
        <div class="session-body">
          <nav class="branches" aria-label="Branches">
            <h2>Branches</h2>
            {shown.branches.length === 0 && <p class="quiet">None yet.</p>}
            <ul>
              {shown.head_id !== null && (
                <li><a data-go href={link({ head: 'root', at: '' })}><Card /><span class="name">Where jobs began</span></a></li>
              )}
              {shown.branches.map((branch) => (
                <li key={branch.head_id}>
                  <a data-go href={link({ head: branch.head_id, at: '' })} aria-current={branch.head_id === shown.head_id ? 'true' : undefined} dir="auto">
                    <Branch /><span class="name">{branch.label || branch.head_id.slice(0, 8)}</span>
                  </a>
                  <span class="quiet">{branch.head_id === shown.session_head_id && <strong>checked out, </strong>}<Moment ms={Date.parse(branch.created_at)} /></span>
                </li>
              ))}
            </ul>
          </nav>
          <section class="talk scrolls" aria-label="Conversation" tabIndex={0}>
            {shown.head_id === null && shown.messages.length > 0 && (
              <div class="box calm"><p>Jobs that began a conversation of their own. Open one, or look at its branch.</p></div>
            )}
            {shown.head_id !== null && (
              <div class={`box ${isHead ? 'calm' : ''}`}>
                <p>{isHead ? 'This branch is checked out: a job that inherits the conversation goes on from here.' : 'You are looking at another branch than the one that is checked out.'}</p>
                {!isHead && <button type="button" class="small" onClick={() => void checkOut(shown.head_id!)}>Check out this branch</button>}
                {!isHead && shown.session_head_id !== null && <a data-go class="button small" href={link({ head: '', at: '' })}>Back to the checked-out one</a>}
              </div>
            )}
            {before !== null && <button type="button" class="small" onClick={() => void showOlder()}>Show earlier messages</button>}
            <Messages messages={[...(earlier?.messages ?? []), ...shown.messages]} session={session} onCheckout={(node) => void checkOut(node)} />
            {!shown.complete && <p class="quiet">Some messages of this session cannot be read.</p>}
            <p class="foot">{count(shown.messages.length + (earlier?.messages.length ?? 0), 'message')}{before !== null ? ', and more before' : ''}</p>
          </section>
        </div>
      )}
    </div>
  );
}
