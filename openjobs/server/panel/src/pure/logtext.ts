/** The newest part of a log in memory: pieces of text in, lines out. Offsets count bytes and stay exact. Pure. */

export interface LogLine {
  /** grows by one a line, also across lines that were dropped or added at the top */
  n: number;
  text: string;
}

/** Text is taken in order of offset; a line may be cut anywhere. Old lines fall off at the top, whole. */
export class LogText {
  lines: LogLine[] = [];
  /** whether lines fell off at the top: nothing more can be put there */
  dropped = false;
  private open = false;
  private chars = 0;
  private next = 0;

  /** `start`: offset of the first byte; `end`: offset behind the last */
  constructor(
    public start = 0,
    public end = start,
    private mostChars = 4_000_000,
    private mostLines = 20_000,
    private longest = 20_000,
  ) {}

  /** The text of the bytes from `offset` to `next`. False, and nothing taken, where it does not follow. */
  append(offset: number, next: number, text: string): boolean {
    if (offset !== this.end) return false;
    this.end = next;
    for (const [index, part] of text.split('\n').entries()) {
      if (index > 0) this.close();
      this.extend(part);
    }
    this.chars += text.length;
    this.trim();
    return true;
  }

  /** The bytes from `offset` up to what is there, which began with a line. False where it does not fit. */
  prepend(offset: number, next: number, text: string): boolean {
    if (next !== this.start || this.dropped) return false;
    const parts = text.split('\n');
    if (parts[parts.length - 1] === '') parts.pop();
    const first = (this.lines[0]?.n ?? this.next) - parts.length;
    this.lines = [...parts.map((part, index) => ({ n: first + index, text: part.slice(0, this.longest) })), ...this.lines];
    this.start = offset;
    this.chars += text.length;
    return true;
  }

  private close(): void {
    if (!this.open) this.lines.push({ n: this.next++, text: '' });
    this.open = false;
  }

  private extend(part: string): void {
    while (part) {
      const last = this.lines[this.lines.length - 1];
      const room = this.open && last ? this.longest - last.text.length : 0;
      // A new object each time: what was drawn from the old one stays as it was.
      if (room > 0) this.lines[this.lines.length - 1] = { n: last!.n, text: last!.text + part.slice(0, room) };
      else this.lines.push({ n: this.next++, text: part.slice(0, this.longest) });
      part = part.slice(room > 0 ? room : this.longest);
      this.open = true;
    }
  }

  private trim(): void {
    let drop = Math.max(0, this.lines.length - this.mostLines);
    for (let i = 0; i < drop; i++) this.chars -= this.lines[i]!.text.length + 1;
    while (this.chars > this.mostChars && drop < this.lines.length - 1) this.chars -= this.lines[drop++]!.text.length + 1;
    if (drop === 0) return;
    this.lines = this.lines.slice(drop);
    this.dropped = true;
  }
}

/** How many bytes at the end of `bytes` are the beginning of a UTF-8 character that is cut off. */
export function cutOff(bytes: Uint8Array): number {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back]!;
    if (byte < 0x80) return 0;
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) ? back : 0;
  }
  return 0;
}

/** The indexes of the lines that have the words of a search, in order. */
export function found(lines: readonly string[], query: string): number[] {
  const wanted = query.toLowerCase();
  if (!wanted) return [];
  const hits: number[] = [];
  lines.forEach((line, index) => line.toLowerCase().includes(wanted) && hits.push(index));
  return hits;
}
