/** A job's or process's log: its newest part at once, the rest as it is written. */

import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { parseLine, plain, type Look, type Piece } from '../pure/ansi';
import { bytes as sizeOf, count } from '../pure/format';
import { cutOff, found, LogText, type LogLine } from '../pure/logtext';
import { address, getBytes, part, said } from '../wire/api';
import type { WireError } from '../wire/types';
import { Arrow, Close, Download, Search } from './icons';

const TAIL = 128 * 1024;
const CHUNK = 200;

interface LogState {
  text: LogText;
  n: number;
  phase: 'reading' | 'live' | 'waiting' | 'ended' | 'failed' | 'none' | 'broken';
  outcome: string;
  size: number;
}

function useLog(id: string) {
  const [state, setState] = useState<LogState>({ text: new LogText(), n: 0, phase: 'reading', outcome: '', size: 0 });
  const current = useRef(state.text);
  const show = (more: Partial<LogState>) => setState((old) => ({ ...old, ...more, n: old.n + 1 }));

  useEffect(() => {
    let source: EventSource | null = null;
    let ended = false;
    let text = new LogText();
    let timer: ReturnType<typeof setTimeout> | undefined;
    current.current = text;
    setState({ text, n: 0, phase: 'reading', outcome: '', size: 0 });

    const follow = () => {
      if (ended) return;
      source = new EventSource(address(`log/${part(id)}/stream`, { offset: text.end }));
      const done = () => (source?.close(), (source = null));
      source.addEventListener('data', (event) => {
        const data = JSON.parse(event.data) as { offset: number; next_offset: number; text: string };
        if (data.next_offset <= text.end) return;
        if (!text.append(data.offset, data.next_offset, data.text)) {
          // A gap: read on from what is here.
          done();
          timer = setTimeout(follow, 500);
          return;
        }
        soon({ phase: 'live', size: text.end });
      });
      source.addEventListener('waiting', () => soon({ phase: 'waiting' }));
      source.addEventListener('end', (event) => {
        const data = JSON.parse(event.data) as { size: number; outcome: string | null };
        done();
        soon({ phase: 'ended', outcome: data.outcome ?? '', size: data.size });
      });
      source.addEventListener('failed', (event) => {
        done();
        soon({ phase: 'failed', outcome: (JSON.parse(event.data) as { message: string }).message });
      });
      source.onerror = () => {
        if (source?.readyState !== 2) return; // it tries again by itself
        done();
        soon({ phase: 'broken' });
        timer = setTimeout(follow, 3000);
      };
    };

    // Many small pieces are drawn together; what came last holds.
    let drawing = false;
    let last: Partial<LogState> = {};
    const soon = (more: Partial<LogState>) => {
      last = more;
      if (drawing) return;
      drawing = true;
      setTimeout(() => {
        drawing = false;
        if (!ended) show(last);
      }, 30);
    };

    // Its newest part, in one piece; what comes after it is followed.
    const read = async () => {
      try {
        const tail = await getBytes(`log/${part(id)}`, { tail: TAIL });
        if (ended) return;
        let from = 0;
        if (tail.offset > 0) {
          // The first line is most likely cut: begin with a whole one.
          const end = tail.bytes.indexOf(10);
          from = end < 0 ? 0 : end + 1;
        }
        const to = tail.bytes.length - (tail.complete ? 0 : cutOff(tail.bytes));
        const start = tail.offset + from;
        text = current.current = new LogText(start);
        text.append(start, tail.offset + to, new TextDecoder().decode(tail.bytes.subarray(from, to)));
        setState({ text, n: 1, phase: tail.complete ? 'ended' : 'live', outcome: '', size: tail.size });
        follow();
      } catch (error) {
        if (!ended) show({ phase: 'failed', outcome: said(error) });
      }
    };

    // Whether there is a log is asked of the stream: it can say "not yet", which a request for bytes cannot.
    const probe = (source = new EventSource(address(`log/${part(id)}/stream`)));
    const answered = (then: () => void) => () => {
      probe.close();
      if (source === probe) source = null;
      if (!ended) then();
    };
    probe.addEventListener('waiting', () => show({ phase: 'waiting' }));
    for (const name of ['data', 'end']) probe.addEventListener(name, answered(() => void read()));
    probe.addEventListener('failed', (event) => {
      const { code, message } = JSON.parse(event.data) as WireError;
      answered(() => show(code === 'not_found' ? { phase: 'none' } : { phase: 'failed', outcome: message }))();
    });
    probe.onerror = () => {
      if (probe.readyState === 2) answered(() => show({ phase: 'failed', outcome: 'the server did not answer' }))();
    };
    return () => {
      ended = true;
      clearTimeout(timer);
      source?.close();
    };
  }, [id]);

  const earlier = async () => {
    const text = current.current;
    const offset = Math.max(0, text.start - TAIL);
    const { bytes, offset: at, next } = await getBytes(`log/${part(id)}`, { offset, limit: text.start - offset });
    const from = at > 0 ? Math.max(0, bytes.indexOf(10) + 1) : 0;
    text.prepend(at + from, next, new TextDecoder().decode(bytes.subarray(from)));
    show({});
  };
  return { state, earlier };
}

export function Log({ id }: { id: string }) {
  const { state, earlier } = useLog(id);
  const { text, phase } = state;
  const [wrap, setWrap] = useState(true);
  const [query, setQuery] = useState('');
  const [hit, setHit] = useState(0);
  const [follow, setFollow] = useState(true);
  const [behind, setBehind] = useState(0);
  const box = useRef<HTMLDivElement>(null);
  const lastLine = text.lines[text.lines.length - 1]?.n ?? -1;
  const seenLine = useRef(-1);

  // Follows only where the end was seen: who scrolled up to read is left alone.
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    if (follow) {
      element.scrollTop = element.scrollHeight;
      seenLine.current = lastLine;
      setBehind(0);
    } else setBehind(Math.max(0, lastLine - seenLine.current));
  }, [state.n, follow, wrap]);

  const scrolled = () => {
    const element = box.current!;
    const bottom = element.scrollTop + element.clientHeight >= element.scrollHeight - 12;
    if (bottom) (seenLine.current = lastLine), setBehind(0);
    setFollow(bottom);
  };

  const hits = query ? found(text.lines.map((line) => plain(line.text)), query) : [];
  const at = hits.length ? Math.min(hit, hits.length - 1) : 0;
  useHighlights(box, query, hits.length ? text.lines[hits[at]!]!.n : null, state.n);
  const step = (by: number) => {
    if (!hits.length) return;
    setFollow(false);
    setHit((at + by + hits.length) % hits.length);
  };

  if (phase === 'none') return <p class="quiet pad">There is no log: what ran this job wrote none.</p>;
  return (
    <div class="log">
      <div class="log-bar">
        <div class="find">
          <Search />
          <input type="search" aria-label="Search in the log" placeholder="Search the log" value={query} spellcheck={false}
            onInput={(event) => (setQuery(event.currentTarget.value), setHit(0))}
            onKeyDown={(event) => event.key === 'Enter' && (event.preventDefault(), step(event.shiftKey ? -1 : 1))} />
          {query && (
            <>
              <span class="quiet n" role="status">{hits.length ? `${at + 1} of ${hits.length}` : 'not found'}</span>
              <button type="button" class="ghost small" aria-label="Clear the search" onClick={() => setQuery('')}><Close /></button>
            </>
          )}
        </div>
        <label class="check"><input type="checkbox" checked={wrap} onChange={() => setWrap(!wrap)} />Wrap</label>
        <a class="button ghost small" href={address(`log/${part(id)}`, { download: 1 })} download aria-label="Download the log" title="Download the log"><Download /></a>
      </div>
      <div class={`log-text ${wrap ? 'wrap' : ''}`} ref={box} role="log" aria-label="Log" aria-live="off" tabIndex={0} onScroll={scrolled}>
        {text.start > 0 && !text.dropped && <button type="button" class="ghost small" onClick={() => void earlier()}>Show earlier lines ({sizeOf(text.start)} before)</button>}
        {text.dropped && <p class="quiet">Earlier lines are in the download.</p>}
        <Chunks lines={text.lines} />
      </div>
      <div class="log-foot">
        <LogPhase state={state} />
        <span class="gap" />
        {!follow && (
          <button type="button" class="small" onClick={() => setFollow(true)}>
            <Arrow />{behind > 0 ? `${count(behind, 'new line')}` : 'To the end'}
          </button>
        )}
      </div>
    </div>
  );
}

function LogPhase({ state: { phase, outcome, size } }: { state: LogState }) {
  const amount = sizeOf(size);
  switch (phase) {
    case 'reading': return <span>Reading…</span>;
    case 'waiting': return <span>Nothing was written yet.</span>;
    case 'live': return <span class="live-dot">Live, {amount}</span>;
    case 'ended': return <span>Complete, {amount}{outcome && `, ${outcome}`}</span>;
    case 'broken': return <span>The connection is lost; trying again.</span>;
    default: return <span class="bad">The log cannot be read: {outcome}</span>;
  }
}

/** Lines in blocks, so that new ones touch the last block only and the browser skips what is not seen. */
function Chunks({ lines }: { lines: readonly LogLine[] }) {
  const cache = useRef<{ key: LogLine[]; start: Look; pieces: Piece[][]; end: Look; node: preact.JSX.Element }[]>([]);
  const old = cache.current;
  const next: typeof old = [];
  let look: Look = {};
  let at = 0;
  while (at < lines.length) {
    // Blocks are cut by line number, so that they stay the same when lines come at the top.
    const block = Math.floor(lines[at]!.n / CHUNK);
    let end = at;
    while (end < lines.length && Math.floor(lines[end]!.n / CHUNK) === block) end++;
    const key = lines.slice(at, end);
    const known = old.find((c) => c.key[0]!.n === key[0]!.n && c.key.length === key.length);
    if (known && known.start === look && known.key[known.key.length - 1] === key[key.length - 1]) {
      next.push(known);
      look = known.end;
    } else {
      const start = look;
      const pieces = key.map((line) => {
        const parsed = parseLine(line.text, look);
        look = parsed.end;
        return parsed.pieces;
      });
      const node = (
        <div class="chunk" key={block}>
          {key.map((line, index) => <div class="line" key={line.n} data-n={line.n}>{pieces[index]!.length ? pieces[index]!.map(toSpan) : '\u200b'}</div>)}
        </div>
      );
      next.push({ key, start, pieces, end: look, node });
    }
    at = end;
  }
  cache.current = next;
  return <>{next.map((chunk) => chunk.node)}</>;
}

function toSpan({ text, look }: Piece) {
  const names: string[] = [];
  let { fg, bg } = look;
  if (look.inverse) [fg, bg] = [bg ?? 'inv-fg', fg ?? 'inv-bg'];
  const style: Record<string, string> = {};
  if (typeof fg === 'number') names.push(`f${fg}`);
  else if (fg?.startsWith('#')) style.color = fg;
  else if (fg) names.push(fg);
  if (typeof bg === 'number') names.push(`b${bg}`);
  else if (bg?.startsWith('#')) style.backgroundColor = bg;
  else if (bg) names.push(bg);
  for (const name of ['bold', 'dim', 'italic', 'underline', 'strike'] as const) if (look[name]) names.push(name);
  if (names.length === 0 && Object.keys(style).length === 0) return text;
  return <span class={names.join(' ')} style={style}>{text}</span>;
}

/** Marks what a search found, without touching the text: coloured spans may begin in the middle of a word. */
function useHighlights(box: { current: HTMLDivElement | null }, query: string, current: number | null, fresh: number): void {
  useEffect(() => {
    const registry = (CSS as { highlights?: Map<string, Highlight> }).highlights;
    const element = box.current;
    if (!element || !registry) return;
    const all: Range[] = [];
    const here: Range[] = [];
    const wanted = query.toLowerCase();
    if (wanted) {
      for (const line of element.querySelectorAll<HTMLElement>('.line')) {
        const text = line.textContent!.toLowerCase();
        if (text.length !== line.textContent!.length) continue;
        for (let from = text.indexOf(wanted); from >= 0 && all.length < 5000; from = text.indexOf(wanted, from + wanted.length)) {
          const range = rangeIn(line, from, from + wanted.length);
          if (range) (Number(line.dataset.n) === current ? here : all).push(range);
        }
      }
    }
    registry.set('found', new Highlight(...all));
    registry.set('found-here', new Highlight(...here));
    return () => (registry.delete('found'), registry.delete('found-here'), undefined);
  }, [query, current, fresh]);
  useEffect(() => {
    if (current !== null) box.current?.querySelector(`[data-n="${current}"]`)?.scrollIntoView({ block: 'center' });
  }, [query, current]);
}

function rangeIn(line: HTMLElement, from: number, to: number): Range | null {
  const range = document.createRange();
  const walker = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
  let at = 0;
  let begun = false;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const length = node.textContent!.length;
    if (!begun && from < at + length) (range.setStart(node, from - at), (begun = true));
    if (begun && to <= at + length) return range.setEnd(node, to - at), range;
    at += length;
  }
  return null;
}
