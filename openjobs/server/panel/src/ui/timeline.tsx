/** One bar a job: pale while it waited, full while it ran. */

import { useMemo } from 'preact/hooks';
import { duration, moment } from '../pure/format';
import { spent, WORDS, type Item } from '../pure/items';
import { barOf, spanOf, ticks, type Span } from '../pure/timeline';
import { second, serverNow } from '../state/clock';
import { cursor, openId } from '../state/chosen';
import { items } from '../state/live';
import { filter, go, link, route } from '../state/route';
import { matcher } from '../pure/items';
import { narrow, useWindow } from './hooks';
import { Empty } from './parts';
import { RowMark } from './status';

const SPANS: [string, string][] = [['', 'All that is shown'], ['5', 'Last 5 minutes'], ['15', 'Last 15 minutes'], ['60', 'Last hour'], ['360', 'Last 6 hours'], ['1440', 'Last day'], ['10080', 'Last week']];
const HEIGHT = 32;
const RECENT = 200;

export function Timeline() {
  const now = Math.max(second.value, serverNow());
  const fits = useMemo(() => items.value.filter(matcher(filter.value)), [items.value, filter.value]);
  const minutes = Number(route.value.span);
  const span: Span = minutes > 0 ? { from: now - minutes * 60_000, to: now + minutes * 600 } : spanOf(fits.slice(0, RECENT), now);
  const shown = fits.filter((item) => (item.ended ?? now) >= span.from && (item.queued ?? item.created) <= span.to);
  const { scroller, seen } = useWindow(shown.length, HEIGHT);
  const place = (ms: number) => ((ms - span.from) / (span.to - span.from)) * 100;
  // A mark at the right end would have no room for its time.
  const marks = ticks(span, narrow.value ? 3 : 7).filter((ms) => place(ms) < (narrow.value ? 70 : 88));
  return (
    <section class="timeline" aria-label="Timeline">
      <div class="time-bar">
        <span class="pick">
          <select aria-label="Span" value={route.value.span} onChange={(event) => go({ span: event.currentTarget.value }, true)}>
            {SPANS.map(([value, name]) => <option key={value} value={value}>{value === '' && fits.length > RECENT ? `The newest ${RECENT}` : name}</option>)}
          </select>
        </span>
        <span class="legend"><i class="bar waiting" aria-hidden="true" />waited</span>
        <span class="legend"><i class="bar running s-running" aria-hidden="true" />ran</span>
      </div>
      <div class="list lanes" ref={scroller}>
        {shown.length === 0 ? <Empty title="Nothing in this span"><p>Choose a longer span, or another filter.</p></Empty> : (
          <table role="table" aria-label="Timeline of jobs" aria-rowcount={shown.length + 1}>
            <thead role="rowgroup">
              <tr role="row" aria-rowindex={1}>
                <th role="columnheader" class="c-subject">Job</th>
                <th role="columnheader" class="c-time">
                  <span class="sr">Time</span>
                  {marks.map((ms) => <span key={ms} class="tick" style={{ left: `${place(ms)}%` }}>{moment(ms, now)}</span>)}
                </th>
              </tr>
            </thead>
            <tbody role="rowgroup">
              {seen.above > 0 && <tr class="pad" aria-hidden="true" style={{ height: `${seen.above}px` }}><td colSpan={2} /></tr>}
              {shown.slice(seen.first, seen.end).map((item, index) => <Lane key={item.id} item={item} span={span} now={now} place={seen.first + index + 2} marks={marks.map(place)} />)}
              {seen.below > 0 && <tr class="pad" aria-hidden="true" style={{ height: `${seen.below}px` }}><td colSpan={2} /></tr>}
            </tbody>
          </table>
        )}
      </div>
    </section>
  );
}

function Lane({ item, span, now, place, marks }: { item: Item; span: Span; now: number; place: number; marks: number[] }) {
  const bar = barOf(item, span, now);
  const { waited, ran } = spent(item, now);
  const words = `waited ${duration(waited)}${ran === null ? '' : `, ran ${duration(ran)}`}, ${WORDS[item.status]}`;
  const to = item.kind === 'job' ? { job: item.id, process: '', tab: '' } : { job: '', process: item.id, tab: '' };
  return (
    <tr role="row" aria-rowindex={place} class={`${cursor.value === item.id ? 'at' : ''} ${openId.value === item.id ? 'open' : ''}`} onClick={(event) => !(event.target as Element).closest('a') && go(to)} onPointerDown={() => (cursor.value = item.id)}>
      <td role="cell" class="c-subject"><div class="subject"><RowMark row={item} /><a data-go id={`row-${item.id}`} href={link(to)} dir="auto" class={item.kind === 'process' ? 'mono' : ''}>{item.subject || item.id}</a></div></td>
      <td role="cell" class="c-time" title={words}>
        <span class="sr">{words}</span>
        {marks.map((left) => <i key={left} class="rule" style={{ left: `${left}%` }} aria-hidden="true" />)}
        {bar.waiting && <i class="bar waiting" style={{ left: `${bar.waiting[0]}%`, width: `${bar.waiting[1]}%` }} aria-hidden="true" />}
        {bar.running && <i class={`bar running s-${item.status}`} style={{ left: `${bar.running[0]}%`, width: `${bar.running[1]}%` }} aria-hidden="true" />}
      </td>
    </tr>
  );
}
