import { useEffect, useState } from 'preact/hooks';
import { covered } from './hooks';
import { openId } from '../state/chosen';
import { enter, logIn, phase, runningTotal, trouble } from '../state/live';
import { route } from '../state/route';
import { dismiss, notes, spoken } from '../state/say';
import { said } from '../wire/api';
import { Dialogs } from './dialogs';
import { Drawer } from './drawer';
import { Filters, Head, Lost, Marked } from './head';
import { Close } from './icons';
import { List } from './list';
import { Empty, Failed } from './parts';
import { Session, Sessions } from './sessions';
import { Timeline } from './timeline';

export function App() {
  const n = runningTotal.value;
  useEffect(() => {
    document.title = n > 0 ? `(${n}) openjobs` : 'openjobs';
    const badge = navigator as { setAppBadge?: (n: number) => Promise<void> };
    void badge.setAppBadge?.(n).catch(() => undefined);
  }, [n]);
  return (
    <>
      <Body />
      <div class="sr" role="status" aria-live="polite" aria-atomic="true">{spoken.value}</div>
      <div class="notes" aria-hidden="true">
        {notes.value.map((note) => (
          <div key={note.id} class={`note ${note.bad ? 'bad' : ''}`}>
            <span>{note.text}</span>
            <button type="button" class="ghost small" tabIndex={-1} onClick={() => dismiss(note.id)}><Close /></button>
          </div>
        ))}
      </div>
    </>
  );
}

function Body() {
  switch (phase.value) {
    case 'starting': return <main class="center"><p class="quiet">Reading…</p></main>;
    case 'login': return <Login />;
    case 'failed': return (
      <main class="center">
        <Empty title="The server cannot be reached">
          <Failed what="" error={trouble.value} again={() => void enter()} />
          <p>Is it running? Start it with <code>openjobs serve</code>.</p>
        </Empty>
      </main>
    );
    case 'ready': return <Ready />;
  }
}

function Ready() {
  const view = route.value.view;
  const beneath = openId.value !== '' && covered.value;
  return (
    <>
      <div class="top" inert={beneath}><Head /><Lost /></div>
      <div class={`frame ${openId.value ? 'with-drawer' : ''}`}>
        <main inert={beneath}>
          {(view === 'jobs' || view === 'timeline') && <h1 class="sr">{view === 'jobs' ? 'Jobs' : 'Timeline'}</h1>}
          {(view === 'jobs' || view === 'timeline') && <Filters />}
          {view === 'jobs' && <List />}
          {view === 'timeline' && <Timeline />}
          {view === 'sessions' && <Sessions />}
          {view === 'session' && <Session key={route.value.session} />}
          <Marked />
        </main>
        <Drawer />
      </div>
      <Dialogs />
    </>
  );
}

function Login() {
  const [token, setToken] = useState('');
  const [error, setError] = useState(trouble.value);
  const [busy, setBusy] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await logIn(token.trim());
    } catch (e) {
      setError(said(e));
    }
    setBusy(false);
  };
  return (
    <main class="center">
      <form class="login" onSubmit={(event) => void submit(event)}>
        <h1><span class="logo" aria-hidden="true" />openjobs</h1>
        <p>This page may do everything that you may do with your jobs, so it wants to know that it is you.</p>
        <ol>
          <li>Run <code>openjobs serve --url</code> in a terminal and open the link that it prints,</li>
          <li>or paste the token, which is in the file <code>serve.token</code> of the home directory.</li>
        </ol>
        {error && <p class="bad" role="alert">{error}</p>}
        <label class="field">Token
          <input type="password" autocomplete="off" value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        </label>
        <button type="submit" class="primary" disabled={busy || !token.trim()}>Log in</button>
      </form>
    </main>
  );
}
