/** Requests over HTTP. Every failure is a `Failure` with a code and a sentence that can be shown. */

import type { WireError } from './types';

export class Failure extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly status = 0,
  ) {
    super(message);
  }
}

const base = new URL('./api/', document.baseURI);

export function address(path: string, query: Record<string, string | number | null | undefined> = {}): string {
  const url = new URL(path, base);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== '') url.searchParams.set(name, String(value));
  }
  return url.href;
}

export function socketAddress(): string {
  const url = new URL('ws', base);
  url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
  return url.href;
}

/** Called when the server says that nobody is logged in. */
export const onLoggedOut: { call: () => void } = { call: () => {} };

async function ask(url: string, init: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url, { credentials: 'same-origin', ...init });
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error;
    throw new Failure('unreachable', 'The server did not answer.');
  }
  if (response.ok) return response;
  let said: WireError = { code: 'failed', message: `The server answered with ${response.status}.` };
  try {
    const body = (await response.json()) as { error?: WireError };
    if (body.error) said = body.error;
  } catch {
    // Not one of the server's own answers: the status says what can be said.
  }
  if (response.status === 401 && !url.includes('/login')) onLoggedOut.call();
  throw new Failure(said.code, said.message, response.status);
}

export async function get<T>(path: string, query: Parameters<typeof address>[1] = {}, signal?: AbortSignal): Promise<T> {
  const response = await ask(address(path, query), signal ? { signal } : {});
  return (await response.json()) as T;
}

export async function post<T>(path: string, body: unknown = {}): Promise<T | null> {
  const response = await ask(address(path), {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
  });
  return response.status === 204 ? null : ((await response.json()) as T);
}

export async function getBytes(
  path: string,
  query: Parameters<typeof address>[1],
): Promise<{ bytes: Uint8Array; offset: number; next: number; size: number; complete: boolean }> {
  const response = await ask(address(path, query), {});
  const bytes = new Uint8Array(await response.arrayBuffer());
  const number = (name: string) => Number(response.headers.get(name) ?? 0);
  return {
    bytes,
    offset: number('X-Log-Offset'),
    next: number('X-Log-Next-Offset'),
    size: number('X-Log-Size'),
    complete: response.headers.get('X-Log-Complete') === 'true',
  };
}

export const said = (error: unknown): string => (error instanceof Error ? error.message : String(error));
export const part = encodeURIComponent;
