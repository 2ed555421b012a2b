import { describe, expect, it } from 'vitest';
import { parseLine, plain } from '../src/pure/ansi';
import { age, bytes, duration } from '../src/pure/format';
import { counts, lines, matcher, placeOf, queuePlaces, spent, toItem, type Filter, type Item } from '../src/pure/items';
import { cutOff, LogText } from '../src/pure/logtext';
import { barOf, spanOf, ticks } from '../src/pure/timeline';
import { revealed, windowOf } from '../src/pure/window';
import type { JobRow } from '../src/wire/types';

export function job(id: string, more: Partial<JobRow> = {}): Item {
  return toItem({
    kind: 'job', id, job_id: id, subject: `about ${id}`, agent_id: 'main', status: 'completed', session_id: 's',
    caller_session_id: null, created_at: '2026-01-01T00:00:00.000Z', queued_at: null, started_at: null, completed_at: null,
    changed_at: '2026-01-01T00:00:00.000Z', parent_job_id: null, parent_msg_id: null, cancel_requested_at: null,
    cancel_reason: null, error: null, stuck: false, attach_id: null, head_id: null, run_id: null, children: 0,
    queue_position: null, timeout_s: null, revision: 1, ...more,
  });
}

const at = (second: number) => new Date(Date.UTC(2026, 0, 1, 0, 0, second)).toISOString();

describe('times', () => {
  it('says durations in the largest two units', () => {
    expect([0, 400, 12_345, 185_000, 7_620_000, 4 * 86_400_000 + 3 * 3_600_000].map((ms) => duration(ms))).toEqual([
      '0.0 s', '0.4 s', '12 s', '3 min 05 s', '2 h 07 min', '4 d 3 h',
    ]);
    expect(duration(3_999, true)).toBe('3 s');
    expect(duration(-5)).toBe('0.0 s');
  });
  it('says ages in one unit', () => {
    expect([0, 1_999, 43_000, 180_000, 7_300_000, 200_000_000].map(age)).toEqual(['now', 'now', '43 s', '3 min', '2 h', '2 d']);
  });
  it('says sizes', () => {
    expect([812, 4_100, 2_000_000, 45_000_000].map(bytes)).toEqual(['812 B', '4.1 KB', '2.0 MB', '45 MB']);
  });
});

describe('ANSI', () => {
  it('colours what follows and carries the look to the next line', () => {
    const first = parseLine('a\x1b[1;31mred');
    expect(first.pieces).toEqual([{ text: 'a', look: {} }, { text: 'red', look: { bold: true, fg: 1 } }]);
    expect(parseLine('on\x1b[0m off', first.end).pieces.map((p) => p.look)).toEqual([{ bold: true, fg: 1 }, {}]);
  });
  it('knows 256 colours and true colours, and refuses numbers that are none', () => {
    expect(parseLine('\x1b[38;5;196mx').pieces[0]!.look).toEqual({ fg: '#ff0000' });
    expect(parseLine('\x1b[48;2;1;2;3mx').pieces[0]!.look).toEqual({ bg: '#010203' });
    expect(parseLine('\x1b[38;2;999;2;3mx').pieces[0]!.look).toEqual({});
    expect(parseLine('\x1b[38;5;256mx').pieces[0]!.look).toEqual({});
  });
  it('shows nothing of titles, links, cursor moves and control characters', () => {
    expect(plain('\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b[2K\x1b[1Gc\x00\x08d\x1b[?25l\x1b(B')).toBe('abcd');
    expect(plain('cut\x1b[3')).toBe('cut');
  });
  it('shows what a progress bar wrote last', () => {
    expect(plain('10%\r50%\r100%\r')).toBe('100%');
    expect(plain('line\r')).toBe('line');
  });
  it('leaves markup as it is', () => {
    expect(plain('<img src=x onerror=alert(1)>')).toBe('<img src=x onerror=alert(1)>');
  });
});

describe('the list', () => {
  const parent = job('p', { created_at: at(10) });
  const older = job('c1', { created_at: at(11), parent_job_id: 'p' });
  const newer = job('c2', { created_at: at(12), parent_job_id: 'p' });
  const deep = job('g', { created_at: at(13), parent_job_id: 'c1' });
  const other = job('o', { created_at: at(14) });
  const all = [other, deep, newer, older, parent];
  it('has children below their parents, oldest first', () => {
    expect(lines(all, () => true, new Set()).map((l) => [l.item.id, l.depth, l.children])).toEqual([
      ['o', 0, 0], ['p', 0, 2], ['c1', 1, 1], ['g', 2, 0], ['c2', 1, 0],
    ]);
  });
  it('folds a parent with all below it', () => {
    expect(lines(all, () => true, new Set(['p'])).map((l) => l.item.id)).toEqual(['o', 'p']);
  });
  it('keeps a child whose parent does not fit, and says so', () => {
    const found = lines(all, (j) => j.id !== 'p', new Set());
    expect(found.filter((l) => l.orphan).map((l) => l.item.id)).toEqual(['c2', 'c1']);
  });
  it('ends where parents go in a circle', () => {
    const a = job('a', { parent_job_id: 'b' });
    const b = job('b', { parent_job_id: 'a' });
    const root = job('r');
    expect(lines([a, b, root], () => true, new Set()).map((l) => l.item.id)).toEqual(['r']);
  });
  it('is as long as a chain of ten thousand', () => {
    const chain = Array.from({ length: 10_000 }, (_, i) => job(`j${i}`, { parent_job_id: i ? `j${i - 1}` : null }));
    expect(lines(chain.reverse(), () => true, new Set()).at(-1)!.depth).toBe(9_999);
  });
  it('searches for every word, in any case, and counts by all but the status', () => {
    const filter: Filter = { groups: new Set(['running']), kind: 'all', session: 's', query: 'ABOUT c' };
    expect(all.filter(matcher({ ...filter, groups: new Set() })).map((j) => j.id)).toEqual(['c2', 'c1']);
    expect(counts(all, filter).completed).toBe(2);
  });
  it('keeps the newest first', () => {
    const list: Item[] = [];
    for (const second of [3, 1, 2, 9, 0]) {
      const item = job(`j${second}`, { created_at: at(second) });
      list.splice(placeOf(list, item.created), 0, item);
    }
    expect(list.map((j) => j.id)).toEqual(['j9', 'j3', 'j2', 'j1', 'j0']);
  });
  it('counts places in the queue', () => {
    const q = (id: string, second: number) => job(id, { status: 'queued', queued_at: at(second) });
    expect([...queuePlaces([q('b', 2), q('a', 1), q('x', 3), job('done')])]).toEqual([['a', 1], ['b', 2], ['x', 3]]);
  });
  it('has processes below the job that started them, and failed ones among the errored', () => {
    const process = toItem({
      kind: 'process', id: 't', task_id: 't', session_id: 's', job_id: 'p', subject: 'make', command: 'make', status: 'timed_out',
      created_at: at(20), started_at: at(20), completed_at: at(21), changed_at: at(21), cancel_requested_at: null,
      cancel_reason: null, error: null, run_id: 't', exit_code: null, signal: null, pid: 1, stopped_by: null,
      stdout_bytes: 0, stderr_bytes: 0, truncated: false,
    });
    expect(lines([process, parent], () => true, new Set()).map((l) => [l.item.id, l.depth])).toEqual([['p', 0], ['t', 1]]);
    expect(process.group).toBe('errored');
  });
  it('says how long a job waited and ran', () => {
    const j = job('j', { queued_at: at(1), started_at: at(4), status: 'running' });
    expect(spent(j, Date.parse(at(10)))).toEqual({ waited: 3000, ran: 6000 });
  });
});

describe('windowing', () => {
  it('holds what is seen and some more, and its heights add up', () => {
    const w = windowOf(10_000, 40, 4_000, 400, 5);
    expect([w.first, w.end]).toEqual([95, 115]);
    expect(w.above + (w.end - w.first) * 40 + w.below).toBe(400_000);
    expect(windowOf(3, 40, 9_999, 400)).toEqual({ first: 0, end: 3, above: 0, below: 0 });
    expect(windowOf(0, 40, 0, 400)).toEqual({ first: 0, end: 0, above: 0, below: 0 });
  });
  it('scrolls as little as needed', () => {
    expect(revealed(5, 40, 0, 400)).toBe(0);
    expect(revealed(10, 40, 0, 400)).toBe(40);
    expect(revealed(2, 40, 200, 400)).toBe(80);
  });
});

describe('log text', () => {
  const utf8 = (text: string) => new TextEncoder().encode(text);
  it('joins lines that were cut anywhere', () => {
    const whole = 'grün\nzwei\n\nvier ✓ ende';
    for (let size = 1; size <= 6; size++) {
      const log = new LogText();
      for (let i = 0; i < whole.length; i += size) expect(log.append(i, Math.min(i + size, whole.length), whole.slice(i, i + size))).toBe(true);
      expect(log.lines.map((l) => l.text)).toEqual(['grün', 'zwei', '', 'vier ✓ ende']);
      expect(log.lines.map((l) => l.n)).toEqual([0, 1, 2, 3]);
    }
  });
  it('refuses what does not follow', () => {
    const log = new LogText();
    log.append(0, 3, 'abc');
    expect(log.append(1, 4, 'bcd')).toBe(false);
    expect(log.append(9, 10, 'x')).toBe(false);
    expect(log.lines.map((l) => l.text)).toEqual(['abc']);
  });
  it('drops old lines, never numbers', () => {
    const log = new LogText(0, 0, 1e6, 3);
    log.append(0, 10, '1\n2\n3\n4\n5\n');
    expect(log.lines).toEqual([{ n: 2, text: '3' }, { n: 3, text: '4' }, { n: 4, text: '5' }]);
    expect(log.prepend(0, 0, 'x')).toBe(false);
  });
  it('takes earlier lines at the top', () => {
    const log = new LogText(10);
    log.append(10, 16, 'c\nd\n');
    expect(log.prepend(6, 10, 'a\nb\n')).toBe(true);
    expect(log.lines.map((l) => [l.n, l.text])).toEqual([[-2, 'a'], [-1, 'b'], [0, 'c'], [1, 'd']]);
    expect(log.start).toBe(6);
  });
  it('breaks a line without end', () => {
    const log = new LogText(0, 0, 1e6, 100, 10);
    log.append(0, 25, 'x'.repeat(25));
    expect(log.lines.map((l) => l.text.length)).toEqual([10, 10, 5]);
    log.append(25, 32, 'yyyyy\nz');
    expect(log.lines.map((l) => l.text)).toEqual(['x'.repeat(10), 'x'.repeat(10), 'xxxxxyyyyy', 'z']);
  });
  it('sees a character that is cut off at the end', () => {
    for (const char of ['a', 'ü', '✓', '😀']) {
      const bytes = utf8(char);
      expect(cutOff(utf8('a' + char))).toBe(0);
      for (let n = 1; n < bytes.length; n++) expect(cutOff(bytes.subarray(0, n))).toBe(n);
    }
    expect(cutOff(new Uint8Array([0x80, 0x80, 0x80, 0x80]))).toBe(0);
  });
});

describe('timeline', () => {
  it('lays bars where they were', () => {
    const j = job('j', { queued_at: at(0), started_at: at(5), completed_at: at(10) });
    expect(barOf(j, { from: Date.parse(at(0)), to: Date.parse(at(20)) }, 0)).toEqual({ waiting: [0, 25], running: [25, 25] });
    expect(barOf(j, { from: Date.parse(at(30)), to: Date.parse(at(40)) }, 0)).toEqual({ waiting: null, running: null });
  });
  it('spans all jobs and marks few round times', () => {
    const span = spanOf([job('a', { queued_at: at(0), completed_at: at(100) })], Date.parse(at(50)));
    expect(span.from).toBeLessThan(Date.parse(at(0)));
    expect(ticks(span).length).toBeLessThanOrEqual(7);
    expect(ticks(span).every((t) => t % 1000 === 0)).toBe(true);
  });
});
