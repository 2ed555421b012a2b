import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Line, type LineState } from '../src/wire/socket';
import type { Event } from '../src/wire/types';

class FakeSocket {
  static all: FakeSocket[] = [];
  readyState = 0;
  sent: Record<string, unknown>[] = [];
  onopen: () => void = () => {};
  onmessage: (message: { data: string }) => void = () => {};
  onclose: () => void = () => {};
  constructor(readonly url: string) {
    FakeSocket.all.push(this);
  }
  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>);
  }
  open(): void {
    this.readyState = 1;
    this.onopen();
  }
  say(frame: unknown): void {
    this.onmessage({ data: JSON.stringify(frame) });
  }
  close(): void {
    this.readyState = 3;
    this.onclose();
  }
}

const newest = () => FakeSocket.all[FakeSocket.all.length - 1]!;
const running = (seq: number, epoch = 'e') => ({ event: 'running_task', epoch, seq, at: `t${seq}`, running: true, running_total: 1 });

describe('the line to the server', () => {
  let states: [LineState, number, number][];
  let events: Event[];
  let mayGoOn: boolean;
  let line: Line;

  beforeEach(() => {
    vi.useFakeTimers();
    FakeSocket.all = [];
    states = [];
    events = [];
    mayGoOn = true;
    line = new Line('ws://x/', { epoch: 'e', seq: 5, since: 't5' }, {
      event: (event) => events.push(event),
      state: (...state) => states.push(state),
      allowed: () => Promise.resolve(mayGoOn),
    }, (url) => new FakeSocket(url) as unknown as WebSocket, () => 0.5);
    line.open();
    newest().open();
    newest().say({ action: 'subscribe', request_id: 's', epoch: 'e', seq: 5, replayed: 0 });
  });
  afterEach(() => {
    line.close();
    vi.useRealTimers();
  });

  it('asks for what came after the list that is shown', () => {
    expect(newest().sent[0]).toMatchObject({ action: 'subscribe', epoch: 'e', after_seq: 5 });
    expect(states.map(([state]) => state)).toEqual(['connecting', 'open']);
  });

  it('goes on where it was, however the events came', async () => {
    newest().say(running(6));
    newest().say({ event: 'batch', events: [running(7), running(8)] });
    newest().close();
    await vi.advanceTimersByTimeAsync(250);
    newest().open();
    expect(newest().sent[0]).toMatchObject({ epoch: 'e', after_seq: 8, since: 't8' });
    expect(events.map((event) => event.seq)).toEqual([6, 7, 8]);
  });

  it('takes the place of another epoch from the snapshot', async () => {
    newest().say({ event: 'snapshot', epoch: 'f', seq: 2, tasks: [], counts: {}, running_total: 0, complete: true, partial: false });
    newest().close();
    await vi.advanceTimersByTimeAsync(250);
    newest().open();
    expect(newest().sent[0]).toMatchObject({ epoch: 'f', after_seq: 2, since: 't5' });
  });

  it('waits longer each time, ten seconds at most, and not at all when asked', async () => {
    newest().close();
    for (let n = 0; n < 8; n++) {
      await vi.advanceTimersByTimeAsync(states.at(-1)![2]);
      newest().close();
    }
    const waits = states.filter(([state]) => state === 'waiting').map(([, , wait]) => wait);
    expect(waits).toEqual([250, 500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
    const before = FakeSocket.all.length;
    line.now();
    expect(FakeSocket.all.length).toBe(before + 1);
    line.now();
    expect(FakeSocket.all.length).toBe(before + 1);
  });

  it('asks a line that says nothing whether it lives, and gives it up when it does not answer', async () => {
    await vi.advanceTimersByTimeAsync(25_000);
    expect(newest().sent.at(-1)).toMatchObject({ action: 'ping' });
    newest().say({ action: 'ping', request_id: 'p', now: '', epoch: 'e', seq: 5 });
    await vi.advanceTimersByTimeAsync(25_000);
    expect(states.at(-1)![0]).toBe('open');
    await vi.advanceTimersByTimeAsync(10_000);
    expect(states.at(-1)![0]).toBe('waiting');
    expect(FakeSocket.all.length).toBe(1);
  });

  it('stops trying when the login has ended', async () => {
    mayGoOn = false;
    newest().close();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(FakeSocket.all.length).toBe(1);
    expect(states.at(-1)![0]).toBe('off');
  });
});
