/** Which rows of a long list need to exist, when every row is equally high. */

export interface Window {
  first: number;
  /** one past the last */
  end: number;
  above: number;
  below: number;
}

export function windowOf(count: number, rowHeight: number, top: number, height: number, spare = 8): Window {
  const most = Math.max(0, count * rowHeight - height);
  top = Math.min(Math.max(0, top), most);
  const first = Math.max(0, Math.floor(top / rowHeight) - spare);
  const end = Math.min(count, Math.ceil((top + height) / rowHeight) + spare);
  return { first, end, above: first * rowHeight, below: Math.max(0, count - end) * rowHeight };
}

/** Where to scroll so that a row is wholly seen; the present place when it is. `head` is covered at the top. */
export function revealed(row: number, rowHeight: number, top: number, height: number, head = 0): number {
  const start = row * rowHeight;
  if (start < top) return start;
  if (start + rowHeight > top + height - head) return start + rowHeight - height + head;
  return top;
}
