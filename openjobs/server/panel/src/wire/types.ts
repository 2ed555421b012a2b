/** What comes over the wire, by the names of docs/server.md. Times are ISO-8601 UTC. All texts are untrusted. */

export type JobStatus = 'pending' | 'queued' | 'running' | 'completed' | 'cancelled' | 'errored';
export type ProcessStatus = 'running' | 'completed' | 'failed' | 'cancelled' | 'timed_out' | 'lost';
export type Status = JobStatus | ProcessStatus;

interface CommonRow {
  id: string;
  session_id: string;
  subject: string;
  created_at: string;
  started_at: string | null;
  completed_at: string | null;
  changed_at: string;
  cancel_requested_at: string | null;
  cancel_reason: string | null;
  error: string | null;
  run_id: string | null;
}

export interface JobRow extends CommonRow {
  kind: 'job';
  job_id: string;
  caller_session_id: string | null;
  agent_id: string;
  status: JobStatus;
  queued_at: string | null;
  stuck: boolean;
  parent_job_id: string | null;
  parent_msg_id: string | null;
  attach_id: string | null;
  head_id: string | null;
  children: number;
  queue_position: number | null;
  timeout_s: number | null;
  revision: number;
}

export interface ProcessRow extends CommonRow {
  kind: 'process';
  task_id: string;
  job_id: string | null;
  command: string;
  status: ProcessStatus;
  exit_code: number | null;
  signal: number | string | null;
  pid: number | null;
  stopped_by: string | null;
  stdout_bytes: number | null;
  stderr_bytes: number | null;
  truncated: boolean | null;
}

export type Row = JobRow | ProcessRow;

export interface WholeJob extends JobRow {
  prompt: string;
  prompt_html: string | null;
  result_text: string | null;
  result_html: string | null;
  partial_result: string | null;
  partial_html: string | null;
  context_mode: 'inherit' | 'clean';
  metadata: Record<string, unknown> | null;
  usage: Record<string, unknown> | null;
  runner_id: string | null;
  parent: JobRow | null;
  child_jobs: JobRow[];
  session_title: string | null;
}

export interface WholeProcess extends ProcessRow {
  cwd: string | null;
  description: string | null;
  timeout_s: number | null;
  output_limit_bytes: number | null;
}

export interface About {
  version: string;
  mode: 'host' | 'attached';
  home: string;
  pid: number;
  epoch: string;
  seq: number;
  workers: number | null;
  now: string;
}

export interface JobList {
  epoch: string;
  seq: number;
  tasks: Row[];
  next_before: string | null;
  counts: Partial<Record<Status, number>>;
  total: number;
  running_total: number;
  complete: boolean;
}

export interface Commit {
  commit_id: string;
  time: string;
  status: JobStatus | null;
  kind: string;
  subject: string;
  runner_id: string | null;
}

export interface SessionRow {
  session_id: string;
  title: string | null;
  created_at: string | null;
  head_id: string | null;
  changed_at: string | null;
  counts: Partial<Record<Status, number>> | null;
  running: number | null;
  damaged: string | null;
}

export interface Attach {
  job_id: string;
  session_id: string;
  status: JobStatus;
  head_id: string | null;
  source_commit_id: string | null;
  label: string | null;
}

export interface Message {
  id: string;
  parent: string | null;
  role: 'user' | 'assistant' | 'system' | 'tool';
  function: string | null;
  created_at: string;
  content: string;
  content_html: string | null;
  job_id: string | null;
  children: string[];
  attach: Attach | null;
}

export interface Branch {
  head_id: string;
  fork_id: string | null;
  label: string | null;
  created_at: string;
  job_id: string | null;
  current: boolean;
}

export interface Conversation {
  session_id: string;
  title: string | null;
  session_head_id: string | null;
  head_id: string | null;
  messages: Message[];
  more_before: string | null;
  branches: Branch[];
  complete: boolean;
}

export interface Profile {
  agent_id: string;
  kind: string;
}

/** An event of the WebSocket. */
export type Event =
  | { event: 'task_created' | 'job_status'; epoch: string; seq: number; at: string; session_id: string; status: Status; task: Row }
  | { event: 'task_progress'; epoch: string; seq: number; at: string; job_id: string; progress: unknown }
  | { event: 'running_task'; epoch: string; seq: number; at: string; running: boolean; running_total: number }
  | {
      event: 'snapshot';
      epoch: string;
      seq: number;
      tasks: Row[];
      counts: Partial<Record<Status, number>>;
      running_total: number;
      complete: boolean;
      partial: boolean;
    };

export interface WireError {
  code: string;
  message: string;
}
