/** The line to the server: events in order, each once; connects again by itself and goes on where it was. */

import type { Event } from './types';

export type LineState = 'connecting' | 'open' | 'waiting' | 'off';

export interface LineEvents {
  event(event: Event): void;
  /** `tries`: how often in a row it failed; `wait`: milliseconds until the next try */
  state(state: LineState, tries: number, wait: number): void;
  /** asked before each try after a failure; false: do not try any more */
  allowed(): Promise<boolean>;
}

/** Events that came at the same time, in order. */
interface Batch {
  event: 'batch';
  events: Event[];
}

interface Place {
  epoch: string;
  seq: number;
  /** `at` of the last event seen */
  since: string | null;
}

const QUIET_MS = 25_000;
const ANSWER_MS = 10_000;

export class Line {
  private socket: WebSocket | null = null;
  private tries = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private watch: ReturnType<typeof setTimeout> | undefined;
  private ended = false;

  constructor(
    private url: string,
    private place: Place,
    private to: LineEvents,
    private make: (url: string) => WebSocket = (url) => new WebSocket(url),
    private random: () => number = Math.random,
  ) {}

  open(): void {
    clearTimeout(this.timer);
    if (this.ended || this.socket) return;
    this.to.state('connecting', this.tries, 0);
    const socket = (this.socket = this.make(this.url));
    this.heard(ANSWER_MS);
    socket.onopen = () => {
      const { epoch, seq, since } = this.place;
      socket.send(JSON.stringify({ action: 'subscribe', request_id: 's', epoch, after_seq: seq, ...(since ? { since } : {}) }));
    };
    socket.onmessage = (message) => this.take(String(message.data));
    socket.onclose = () => this.lost(socket);
  }

  /** Tries at once instead of later: the person asked, or the network came back. */
  now(): void {
    if (!this.socket) this.open();
  }

  close(): void {
    this.ended = true;
    clearTimeout(this.timer);
    clearTimeout(this.watch);
    this.socket?.close();
    this.to.state('off', this.tries, 0);
  }

  private take(text: string): void {
    this.heard(QUIET_MS);
    const frame = JSON.parse(text) as { action?: string; error?: unknown; request_id?: string; seq?: number; epoch?: string };
    if (frame.action === 'subscribe' && !frame.error) {
      this.tries = 0;
      this.to.state('open', 0, 0);
    }
    if ('event' in frame) this.hand(frame as unknown as Event | Batch);
  }

  private hand(event: Event | Batch): void {
    if (event.event === 'batch') {
      for (const one of event.events) this.hand(one);
      return;
    }
    this.place = { epoch: event.epoch, seq: event.seq, since: 'at' in event ? event.at : this.place.since };
    this.to.event(event);
  }

  /** A line that says nothing is asked whether it lives, and given up when it does not answer. */
  private heard(ms: number): void {
    clearTimeout(this.watch);
    const socket = this.socket;
    this.watch = setTimeout(() => {
      if (!socket || socket !== this.socket) return;
      if (ms === QUIET_MS && socket.readyState === 1) {
        socket.send('{"action":"ping","request_id":"p"}');
        this.heard(ANSWER_MS);
      } else {
        socket.close();
        this.lost(socket);
      }
    }, ms);
  }

  private lost(socket: WebSocket): void {
    if (socket !== this.socket) return;
    this.socket = null;
    clearTimeout(this.watch);
    if (this.ended) return;
    const wait = Math.round(Math.min(10_000, 250 * 2 ** this.tries) * (0.75 + this.random() / 2));
    this.tries++;
    this.to.state('waiting', this.tries, wait);
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      if (await this.to.allowed()) this.open();
      else this.close();
    }, wait);
  }
}
