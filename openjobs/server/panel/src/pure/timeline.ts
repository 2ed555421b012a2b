/** Where bars lie on a line of time, in hundredths of its width. Pure. */

import type { Item } from './items';

export interface Span {
  from: number;
  to: number;
}

export interface Bar {
  /** place and length of waiting and running; null: none of it lies in the span */
  waiting: [number, number] | null;
  running: [number, number] | null;
}

export function barOf(job: Item, span: Span, now: number): Bar {
  const began = job.queued ?? job.created;
  const waitedTo = job.started ?? job.ended ?? now;
  return {
    waiting: part(began, waitedTo, span),
    running: job.started === null ? null : part(job.started, job.ended ?? now, span),
  };
}

function part(from: number, to: number, span: Span): [number, number] | null {
  if (to < span.from || from > span.to) return null;
  const width = Math.max(1, span.to - span.from);
  const left = (Math.max(from, span.from) - span.from) / width;
  const right = (Math.min(to, span.to) - span.from) / width;
  return [left * 100, Math.max(0, right - left) * 100];
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** The times that are marked: round ones, at most `most` of them. */
export function ticks(span: Span, most = 6): number[] {
  const wanted = (span.to - span.from) / 1000 / Math.max(1, most);
  const step = (STEPS.find((s) => s >= wanted) ?? STEPS[STEPS.length - 1]!) * 1000;
  const offset = new Date(span.from).getTimezoneOffset() * 60_000;
  const found: number[] = [];
  for (let t = Math.ceil((span.from - offset) / step) * step + offset; t <= span.to; t += step) found.push(t);
  return found.slice(0, 50);
}

/** The span that has all of `jobs`, with a little room; at least ten seconds. */
export function spanOf(jobs: readonly Item[], now: number): Span {
  let from = now;
  let to = -Infinity;
  for (const job of jobs) {
    from = Math.min(from, job.queued ?? job.created);
    to = Math.max(to, job.ended ?? now);
  }
  if (to === -Infinity) to = now;
  if (to - from < 10_000) from = to - 10_000;
  const room = (to - from) * 0.02;
  return { from: from - room, to: to + room };
}
