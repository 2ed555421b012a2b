import { isCancelling, isStuck, WORDS } from '../pure/items';
import type { Row, Status } from '../wire/types';
import { places } from '../state/live';
import { Check, Clock, Cross, Dots, Question, Spinner, Stopped } from './icons';

const ICONS: Record<Status, () => preact.JSX.Element> = {
  pending: Dots,
  queued: Clock,
  running: Spinner,
  completed: Check,
  cancelled: Stopped,
  errored: Cross,
  failed: Cross,
  timed_out: Clock,
  lost: Question,
};

/** A status as icon, word and colour. */
export function Mark({ status, word, cls = '' }: { status: Status; word?: string; cls?: string }) {
  const Icon = ICONS[status] ?? Question;
  return (
    <span class={`mark s-${status} ${cls}`}>
      <Icon />
      <span class="word">{word ?? WORDS[status] ?? status}</span>
    </span>
  );
}

/** The same for a row: with "cancelling…", the place in the queue, and what may still run. */
export function RowMark({ row }: { row: Row }) {
  if (isCancelling(row)) return <Mark status="running" word="cancelling…" cls="dim" />;
  if (row.status === 'queued') {
    const place = places.value.get(row.id) ?? (row.kind === 'job' ? row.queue_position : null);
    return (
      <span class="mark s-queued">
        <Clock />
        <span class="word">queued</span>
        {place !== null && place !== undefined && <span class="place" title={`Number ${place} in the queue`}><span class="sr">, number </span>{place}</span>}
      </span>
    );
  }
  if (isStuck(row)) return <Mark status="cancelled" word="cancelled" cls="stuck" />;
  return <Mark status={row.status} />;
}

export const STUCK_TEXT = 'asked to stop, may still be running in background';
