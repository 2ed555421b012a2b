/** Coloured terminal output as pieces of text with a look. No markup is made here: the page shows pieces as text. */

export interface Look {
  /** 0 to 15: a colour of the palette; a text: `#rrggbb` */
  fg?: number | string;
  bg?: number | string;
  bold?: boolean;
  dim?: boolean;
  italic?: boolean;
  underline?: boolean;
  strike?: boolean;
  inverse?: boolean;
}

export interface Piece {
  text: string;
  look: Look;
}

const PLAIN: Look = Object.freeze({});

// CSI … final; OSC … BEL or ST; other two-character escapes; a started escape at the very end.
const ESCAPE =
  /\x1b\[([0-9;:<=>?]*)[ -/]*([@-~])|\x1b\[[0-9;:?]*$|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]|\x1b$/g;
// Controls that show nothing; tab stays.
const CONTROL = /[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]/g;

/** One line's pieces, and the look in which the next line starts. */
export function parseLine(line: string, start: Look = PLAIN): { pieces: Piece[]; end: Look } {
  line = lastOverwrite(line);
  const pieces: Piece[] = [];
  let look = start;
  let at = 0;
  const push = (text: string) => {
    const clean = text.replace(CONTROL, '');
    if (!clean) return;
    const last = pieces[pieces.length - 1];
    if (last && last.look === look) last.text += clean;
    else pieces.push({ text: clean, look });
  };
  if (!line.includes('\x1b')) {
    push(line);
    return { pieces, end: look };
  }
  for (const match of line.matchAll(ESCAPE)) {
    push(line.slice(at, match.index));
    at = match.index + match[0].length;
    if (match[2] === 'm') look = applied(look, match[1] ?? '');
  }
  push(line.slice(at));
  return { pieces, end: look };
}

/** A progress bar writes its line again and again after a carriage return: what was written last is seen. */
function lastOverwrite(line: string): string {
  if (line.endsWith('\r')) line = line.slice(0, -1);
  const at = line.lastIndexOf('\r');
  return at < 0 ? line : line.slice(at + 1);
}

function applied(look: Look, codes: string): Look {
  let next: Look = { ...look };
  const numbers = codes === '' ? [0] : codes.split(/[;:]/).map(Number);
  for (let i = 0; i < numbers.length; i++) {
    const n = numbers[i] ?? 0;
    if (n === 0) next = {};
    else if (n === 1) next.bold = true;
    else if (n === 2) next.dim = true;
    else if (n === 3) next.italic = true;
    else if (n === 4) next.underline = true;
    else if (n === 7) next.inverse = true;
    else if (n === 9) next.strike = true;
    else if (n === 22) (delete next.bold, delete next.dim);
    else if (n === 23) delete next.italic;
    else if (n === 24) delete next.underline;
    else if (n === 27) delete next.inverse;
    else if (n === 29) delete next.strike;
    else if (n >= 30 && n <= 37) next.fg = n - 30;
    else if (n >= 90 && n <= 97) next.fg = n - 90 + 8;
    else if (n >= 40 && n <= 47) next.bg = n - 40;
    else if (n >= 100 && n <= 107) next.bg = n - 100 + 8;
    else if (n === 39) delete next.fg;
    else if (n === 49) delete next.bg;
    else if (n === 38 || n === 48) {
      const [colour, used] = extended(numbers.slice(i + 1));
      i += used;
      if (colour !== undefined) next[n === 38 ? 'fg' : 'bg'] = colour;
    }
  }
  return Object.keys(next).length ? next : PLAIN;
}

function extended(rest: number[]): [number | string | undefined, number] {
  if (rest[0] === 5) {
    const n = rest[1] ?? -1;
    if (!(n >= 0 && n <= 255)) return [undefined, 2];
    return [n < 16 ? n : cube(n), 2];
  }
  if (rest[0] === 2) {
    const rgb = rest.slice(1, 4);
    if (rgb.length < 3 || rgb.some((v) => !(v >= 0 && v <= 255))) return [undefined, 4];
    return [hex(rgb[0]!, rgb[1]!, rgb[2]!), 4];
  }
  return [undefined, 0];
}

function cube(n: number): string {
  if (n >= 232) {
    const grey = 8 + (n - 232) * 10;
    return hex(grey, grey, grey);
  }
  const level = (v: number) => (v === 0 ? 0 : 55 + v * 40);
  n -= 16;
  return hex(level(Math.floor(n / 36)), level(Math.floor(n / 6) % 6), level(n % 6));
}

function hex(r: number, g: number, b: number): string {
  return '#' + [r, g, b].map((v) => Math.floor(v).toString(16).padStart(2, '0')).join('');
}

/** The text of a line as it is seen, without any escape. */
export function plain(line: string): string {
  return parseLine(line).pieces.map((piece) => piece.text).join('');
}
