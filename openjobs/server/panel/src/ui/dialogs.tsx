/** Stop, start and run again, and the help. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { count } from '../pure/format';
import { closeDialog, dialog, marked, openItem } from '../state/chosen';
import { KEYS } from '../state/keys';
import { items, loadSessions, nameOf, sessions, stop } from '../state/live';
import { note } from '../state/say';
import { get, part, post, said } from '../wire/api';
import type { Profile, WholeJob } from '../wire/types';
import { Dialog, Failed } from './parts';

export function Dialogs() {
  const open = dialog.value;
  switch (open.kind) {
    case 'none': return null;
    case 'help': return <Help />;
    case 'stop': return <Stop ids={open.ids} key={open.ids.join()} />;
    case 'spawn': return <Spawn session={open.session} again={open.again} key={open.again} />;
  }
}

function Help() {
  return (
    <Dialog title="Keyboard" onClose={closeDialog}>
      <table class="keys">
        <tbody>{KEYS.map(([key, what]) => <tr key={key}><th scope="row"><kbd>{key}</kbd></th><td>{what}</td></tr>)}</tbody>
      </table>
      <p class="quiet">Everything that is shown is in the address: a link to a job, a search or a branch can be kept and sent.</p>
    </Dialog>
  );
}

function Stop({ ids }: { ids: string[] }) {
  const [reason, setReason] = useState('');
  const [busy, setBusy] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    await stop(ids, reason);
    marked.value = new Set();
    closeDialog();
  };
  const one = ids.length === 1;
  return (
    <Dialog title={one ? 'Stop this job?' : `Stop ${count(ids.length, 'job')}?`} onClose={closeDialog}>
      <form onSubmit={(event) => void submit(event)}>
        <p class="what-stops" dir="auto">{one ? nameOf(ids[0]!) : ids.slice(0, 4).map(nameOf).join(', ') + (ids.length > 4 ? ` and ${ids.length - 4} more` : '')}</p>
        <p class="quiet">Waiting jobs end at once. Running ones are asked to stop and may take a moment; what they said so far is kept. Jobs that they started are stopped, too.</p>
        <label class="field">Reason (optional)
          <input ref={field} type="text" value={reason} maxLength={500} placeholder="For whoever reads the history" onInput={(event) => setReason(event.currentTarget.value)} />
        </label>
        <footer>
          <button type="button" onClick={closeDialog}>Keep {one ? 'it' : 'them'} running</button>
          <button type="submit" class="danger solid" disabled={busy}>Stop {one ? '' : ids.length}</button>
        </footer>
      </form>
    </Dialog>
  );
}

interface Draft {
  session: string;
  agent: string;
  description: string;
  prompt: string;
  context: 'inherit' | 'clean';
  timeout: string;
}

/** What was typed stays when the dialog is closed by mistake. */
let kept: Draft | null = null;

function Spawn({ session, again }: { session: string; again: string | null }) {
  const [draft, setDraft] = useState<Draft>(
    (again === null && kept) || { session, agent: '', description: '', prompt: '', context: 'inherit', timeout: '' },
  );
  const [profiles, setProfiles] = useState<Profile[]>([]);
  const [original, setOriginal] = useState<WholeJob | null>(null);
  const [error, setError] = useState('');
  const [busy, setBusy] = useState(false);
  const field = useRef<HTMLTextAreaElement>(null);
  const set = (patch: Partial<Draft>) => setDraft((old) => {
    const next = { ...old, ...patch };
    if (again === null) kept = next;
    return next;
  });

  useEffect(() => {
    void loadSessions().catch(() => undefined);
    get<{ profiles: Profile[] }>('profiles').then((answer) => {
      setProfiles(answer.profiles);
      setDraft((old) => ({ ...old, agent: old.agent || usual(answer.profiles) }));
    }, (e: unknown) => setError(said(e)));
    if (again === null) return;
    get<WholeJob>(`jobs/${part(again)}`).then((job) => {
      setOriginal(job);
      setDraft({
        session: job.session_id, agent: job.agent_id, description: job.subject === firstLine(job.prompt) ? '' : job.subject,
        prompt: job.prompt, context: job.context_mode, timeout: job.timeout_s === null ? '' : String(job.timeout_s),
      });
    }, (e: unknown) => setError(said(e)));
  }, []);
  useEffect(() => field.current?.focus(), [original]);

  const submit = async (event: Event) => {
    event.preventDefault();
    if (busy) return;
    const timeout = draft.timeout.trim() ? Number(draft.timeout) : null;
    setError('');
    setBusy(true);
    try {
      const answer = await post<{ job_id: string }>('jobs', {
        session_id: draft.session.trim() || 'main', prompt: draft.prompt, agent_id: draft.agent, description: draft.description.trim(),
        context: draft.context, create_session: true,
        ...(timeout === null ? {} : { timeout_s: timeout }),
        // Run again from the same message, so that the two answers are branches of one conversation.
        ...(original && draft.context === 'inherit' && original.parent_msg_id && original.session_id === draft.session ? { parent_msg_id: original.parent_msg_id } : {}),
      });
      kept = null;
      closeDialog();
      note('Started.');
      openItem(answer!.job_id);
    } catch (e) {
      setError(said(e));
      setBusy(false);
    }
  };
  const names = (sessions.value ?? []).map((row) => row.session_id);
  const agents = profiles.map((profile) => profile.agent_id);
  if (draft.agent && !agents.includes(draft.agent)) agents.unshift(draft.agent);
  return (
    <Dialog title={again === null ? 'New job' : 'Run again'} onClose={closeDialog} wide>
      <form onSubmit={(event) => void submit(event)} onKeyDown={(event) => event.key === 'Enter' && (event.ctrlKey || event.metaKey) && void submit(event)}>
        {error && <Failed what="It was not started." error={error} />}
        <label class="field">Prompt
          <textarea ref={field} rows={8} required value={draft.prompt} onInput={(event) => set({ prompt: event.currentTarget.value })}
            placeholder="What is to be done; for a command profile like “shell”, the command" />
        </label>
        <div class="row">
          <label class="field">Agent
            <select value={draft.agent} onChange={(event) => set({ agent: event.currentTarget.value })}>
              {agents.map((name) => <option key={name} value={name}>{name}</option>)}
            </select>
          </label>
          <label class="field">Session
            <input type="text" list="sessions" value={draft.session} placeholder="main" pattern="[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}" title="Letters, digits, - _ and . ; a new name makes a new session"
              onInput={(event) => set({ session: event.currentTarget.value })} />
            <datalist id="sessions">{names.map((name) => <option key={name} value={name} />)}</datalist>
          </label>
          <label class="field">Context
            <select value={draft.context} onChange={(event) => set({ context: event.currentTarget.value as Draft['context'] })}>
              <option value="inherit">continues the talk</option>
              <option value="clean">starts afresh</option>
            </select>
          </label>
        </div>
        <div class="row">
          <label class="field grow">Subject (optional)
            <input type="text" value={draft.description} maxLength={200} placeholder="A short line for lists" onInput={(event) => set({ description: event.currentTarget.value })} />
          </label>
          <label class="field">Time limit
            <input type="number" min="0.1" step="any" value={draft.timeout} placeholder="seconds, none" onInput={(event) => set({ timeout: event.currentTarget.value })} />
          </label>
        </div>
        <footer>
          <span class="quiet">Ctrl Enter</span>
          <button type="button" onClick={closeDialog}>Cancel</button>
          <button type="submit" class="primary" disabled={busy || !draft.prompt.trim()}>{busy ? 'Starting…' : again === null ? 'Start' : 'Run again'}</button>
        </footer>
      </form>
    </Dialog>
  );
}

/** The agent of the newest job, where it is one that can be chosen. */
function usual(profiles: Profile[]): string {
  const known = new Set(profiles.map((profile) => profile.agent_id));
  for (const item of items.value) if (item.kind === 'job' && known.has(item.agent_id)) return item.agent_id;
  return known.has('main') ? 'main' : (profiles[0]?.agent_id ?? 'main');
}

const firstLine = (text: string) => text.split(/\s+/).filter(Boolean).join(' ');
