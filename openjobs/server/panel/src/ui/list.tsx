/** The live list: a real table of which only the rows that are seen exist. */

import { useEffect, useRef } from 'preact/hooks';
import { isStuck, type Line } from '../pure/items';
import { revealed } from '../pure/window';
import { askSpawn, cursor, marked, openId, toggleMark } from '../state/chosen';
import { folded, items, loaded, progressOf, shown, total, complete } from '../state/live';
import { filter, go, link } from '../state/route';
import { narrow, useWindow } from './hooks';
import { Down, Prompt, Right } from './icons';
import { Empty } from './parts';
import { RowMark, STUCK_TEXT } from './status';
import { Age, Spent } from './time';

export function List() {
  const rows = shown.value;
  const height = narrow.value ? 64 : 42;
  const head = narrow.value ? 0 : 36;
  const { scroller, seen } = useWindow(rows.length, height);
  const moved = useRef('');

  // The line with the cursor is brought into view, and gets the focus where the list had it.
  useEffect(() => {
    const id = cursor.value;
    const element = scroller.current;
    if (!id || !element || moved.current === id) return;
    moved.current = id;
    const at = rows.findIndex((line) => line.item.id === id);
    if (at < 0) return;
    element.scrollTop = revealed(at, height, element.scrollTop, element.clientHeight, head);
    const focus = () => document.getElementById(`row-${id}`)?.focus({ preventScroll: true });
    // Where a drawer is open, the focus is its own unless the list has it.
    const free = document.activeElement === document.body && !openId.value;
    if (free || element.contains(document.activeElement)) requestAnimationFrame(focus);
  }, [cursor.value]);

  // A link to a job shows its place in the list, too.
  useEffect(() => {
    if (openId.value && shown.peek().some((line) => line.item.id === openId.value)) cursor.value = openId.value;
  }, [openId.value]);

  if (rows.length === 0) return <div class="list" ref={scroller}><Nothing /></div>;
  const visible = rows.slice(seen.first, seen.end);
  const stop = visible.some((line) => line.item.id === cursor.value) ? cursor.value : visible[0]?.item.id;
  return (
    <div class="list" ref={scroller}>
      <table role="table" aria-label="Jobs and processes" aria-rowcount={rows.length + 1}>
        <thead role="rowgroup">
          <tr role="row" aria-rowindex={1}>
            <th role="columnheader" class="c-mark"><span class="sr">Marked</span></th>
            <th role="columnheader" class="c-status">Status</th>
            <th role="columnheader" class="c-subject">Subject</th>
            <th role="columnheader" class="c-agent">Agent</th>
            <th role="columnheader" class="c-session">Session</th>
            <th role="columnheader" class="c-age">Age</th>
            <th role="columnheader" class="c-spent">Duration</th>
          </tr>
        </thead>
        <tbody role="rowgroup">
          {seen.above > 0 && <tr class="pad" aria-hidden="true" style={{ height: `${seen.above}px` }}><td colSpan={7} /></tr>}
          {visible.map((line, index) => (
            <Row key={line.item.id} line={line} place={seen.first + index + 2} stop={line.item.id === stop} />
          ))}
          {seen.below > 0 && <tr class="pad" aria-hidden="true" style={{ height: `${seen.below}px` }}><td colSpan={7} /></tr>}
        </tbody>
      </table>
      <More />
    </div>
  );
}

function Row({ line, place, stop }: { line: Line; place: number; stop: boolean }) {
  const { item, depth } = line;
  const isMarked = marked.value.has(item.id);
  const isOpen = openId.value === item.id;
  const cls = [
    cursor.value === item.id && 'at', isMarked && 'marked', isOpen && 'open', item.group !== 'running' && 'still',
  ].filter(Boolean).join(' ');
  const to = item.kind === 'job' ? { job: item.id, process: '', tab: '' } : { job: '', process: item.id, tab: '' };
  const tab = stop ? 0 : -1;
  const indent = Math.min(depth, narrow.value ? 4 : 12);
  return (
    <tr role="row" class={cls} aria-rowindex={place} onPointerDown={() => (cursor.value = item.id)}
      onClick={(event) => {
        // The whole line opens; what is a link, button or box in it does its own work.
        if (!(event.target as Element).closest('a, button, input, label') && !getSelection()?.toString()) go(to);
      }}>
      <td role="cell" class="c-mark">
        <label class="box-hit">
          <input type="checkbox" checked={isMarked} tabIndex={tab} aria-label={`Mark ${item.subject || item.id}`}
            onChange={() => toggleMark(item.id)} />
        </label>
      </td>
      <td role="cell" class="c-status"><RowMark row={item} /></td>
      <td role="cell" class="c-subject">
        <div class="subject" style={{ paddingLeft: `${indent * 18}px` }}>
          {line.children > 0 ? (
            <button type="button" class="fold" tabIndex={tab} aria-expanded={!line.folded}
              aria-label={`${line.children} below ${item.subject || item.id}`} onClick={() => toggleFold(item.id)}>
              {line.folded ? <Right /> : <Down />}
            </button>
          ) : depth > 0 ? <span class="twig" aria-hidden="true" /> : null}
          {item.kind === 'process' && <span class="what" title="Background command"><Prompt /><span class="sr">Process: </span></span>}
          <a data-go id={`row-${item.id}`} href={link(to)} tabIndex={tab} aria-current={isOpen ? 'true' : undefined}
            class={item.kind === 'process' ? 'mono' : ''} dir="auto">
            {item.subject || item.id}
          </a>
          {line.orphan && <span class="hint">child job</span>}
          {line.folded && <span class="hint">+{line.children}</span>}
          <Hint line={line} />
        </div>
      </td>
      <td role="cell" class="c-agent" title={item.kind === 'job' ? item.agent_id : 'process'}>{item.kind === 'job' ? item.agent_id : <span class="quiet">process</span>}</td>
      <td role="cell" class="c-session">
        <a data-go href={link({ view: 'session', session: item.session_id, head: '', at: '', job: '', process: '', tab: '' })} tabIndex={-1}>{item.session_id}</a>
      </td>
      <td role="cell" class="c-age"><Age ms={item.created} /></td>
      <td role="cell" class="c-spent"><Spent item={item} /></td>
    </tr>
  );
}

/** What is worth knowing at a glance: an error, what may still run, what a running turn says. */
function Hint({ line: { item } }: { line: Line }) {
  if (isStuck(item)) return <span class="hint warn" title={STUCK_TEXT}>{STUCK_TEXT}</span>;
  if (item.group === 'errored' && item.error) return <span class="hint bad" title={item.error}>{item.error.split('\n', 1)[0]}</span>;
  if (item.kind === 'process' && item.exit_code) return <span class="hint bad">exit code {item.exit_code}</span>;
  if (item.status === 'running') {
    const said = progressOf(item.id);
    if (said !== undefined) return <span class="hint">{typeof said === 'string' ? said : JSON.stringify(said)}</span>;
  }
  return item.status === 'cancelled' && item.cancel_reason ? <span class="hint">{item.cancel_reason}</span> : null;
}

function toggleFold(id: string): void {
  const next = new Set(folded.value);
  if (!next.delete(id)) next.add(id);
  folded.value = next;
}

function More() {
  if (!loaded.value) return <p class="foot" aria-hidden="true">Reading older jobs… {items.value.length.toLocaleString('en')} of {total.value.toLocaleString('en')}</p>;
  if (!complete.value) return <p class="foot">These are the newest jobs. Older ones are there by their id, and with <code>openjobs list</code>.</p>;
  return null;
}

function Nothing() {
  const { groups, session, query, kind } = filter.value;
  if (groups.size || session || query || kind !== 'all') {
    return (
      <Empty title={loaded.value ? 'Nothing fits this filter' : 'Still reading…'}>
        <p>{loaded.value ? 'Search for less, or show everything.' : 'Older jobs are on their way.'}</p>
        <button type="button" onClick={() => go({ status: '', q: '', session: '', kind: '' })}>Show everything</button>
      </Empty>
    );
  }
  if (!loaded.value) return <Empty title="Reading the jobs…" />;
  return (
    <Empty title="No jobs yet">
      <p>Start one here, or from a terminal:</p>
      <pre class="plain">openjobs agent --agent shell --background 'echo hello'</pre>
      <button type="button" class="primary" onClick={askSpawn}>New job</button>
    </Empty>
  );
}

