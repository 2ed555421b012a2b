"""`AgentTools`: what a model can do with jobs, as functions, as definitions, and by name.

    tools = AgentTools(runner, session_id, caller_msg_id=message_id)
    provider.send(tools=tools.definitions("anthropic"), ...)
    text = tools.call(name, arguments, tool_call_id)

A tool is a method whose signature and docstring a model is shown. Source: spec 003, D5, D7, D10, D14 and D15.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import attrs

from ..errors import (
    IdempotencyConflict,
    InvalidInput,
    NotFound,
    OpenJobsError,
    ParentFinished,
    UnknownAgent,
)
from ..jobs import ContextMode, Job, SpawnRequest, TurnRequest, request_digest
from . import slash, texts
from .answers import Answers
from .calls import Hand, ToolText, told, told_error
from .finding import Finder
from .results import ResultFiles, result_file
from .schema import Filled, Range, Schema, Tool, definition, tool_of
from .waiting import Ends, Pending, settle, settle_async

if TYPE_CHECKING:
    from ..processes import ProcessSupervisor, Task
    from ..runner import JobRunner

T = TypeVar("T")

#: a longer result is cut, and its whole is in a file
RESULT_LIMIT_CHARS = 30_000
#: however many results share one answer, each gets this much
_LEAST_SHARE_CHARS = 1_000
#: agents that start agents: the job of a conversation is 1 deep
MAX_DEPTH = 5
#: ended jobs that a list shows beside all that have not ended
LISTED = 20
#: how long a call whose caller was stopped waits for its job to stop; a runner's patience is 30 s
_STOP_S = 35.0
_SHELL_TIMEOUT_MS = 120_000
_KEY_LIMIT_CHARS = 480

STOPPED = "its caller was stopped"
_NOT_TOLD = "Read it with job_output before you end."


class AgentTools:
    """The tools of one caller: a conversation, or a job (`for_turn`).

    Guarantees

    - A foreground `agent` gives the text that a synchronous tool would: the result, `[task error] …`, or what there
      was and `[cancelled]`.
    - Jobs and commands of other sessions are neither seen nor stopped, and an id of theirs is unknown here.
    - With `caller_msg_id`, the same tool call of the same message with the same request again gets the first job,
      finished or not, after any crash. Another message, or another request, never gets an old answer.
      Without `caller_msg_id` nothing tells a call that is made again from an id that is used again: each is a new job.

    Assumptions: the runner stays open. May be used by any number of threads; nothing in it changes.
    """

    def __init__(
        self,
        runner: JobRunner,
        session_id: str,
        *,
        plan_mode: bool = False,
        processes: ProcessSupervisor | None = None,
        caller_msg_id: str | None = None,
        agents: Sequence[str] | None = None,
        max_depth: int = MAX_DEPTH,
        result_limit_chars: int = RESULT_LIMIT_CHARS,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`caller_msg_id` is the message that makes the calls; where the session has it, cards hang there.

        `agents` are the ids a model may name, the usual one first; None: those that the runner's profiles were given,
        without the built-in ones (`shell` runs its prompt), or any, where a `sync_fn` runs every job. `cwd` and `env`
        are those of the jobs and commands. Raises `UnknownSession`.
        """
        self.session_id = runner.store.session(session_id).session_id
        self.plan_mode = plan_mode
        self.caller_msg_id = caller_msg_id
        self.runner = runner
        self._store = runner.store
        self._processes = processes
        self._agents = tuple(agents) if agents is not None else None
        self._max_depth = max_depth
        self._limit_chars = result_limit_chars
        self._cwd = cwd
        self._env = env
        self._finder = Finder(runner, processes, self.session_id)
        self._answers = Answers(runner, processes)
        self._turn: TurnRequest | None = None
        self._response: str | None = None
        # Of one call, see `_for_call`.
        self._tool_call_id: str | None = None
        self._stops: tuple[threading.Event, ...] = ()
        self._deferred = False

    @classmethod
    def for_turn(cls, request: TurnRequest, **options: Any) -> AgentTools:
        """The tools of a job: what it starts is its child, stops with it, and runs with its `cwd` and `env`.

        Every call raises `CancelledError` once the job was asked to stop. Commands in the background end with the
        job, unless it is a turn of the conversation itself (`SpawnRequest.foreground`): those go on. `options` as for
        the class. Raises `InvalidInput` where no runner runs the turn.
        """
        if request.runner is None:
            raise InvalidInput("this turn is run by no runner, so it cannot have jobs of its own")
        tools = cls(request.runner, request.session_id, **{"cwd": request.cwd, "env": request.env, **options})
        tools._turn = request
        return tools

    def at(self, caller_msg_id: str | None, *, response: str | None = None) -> AgentTools:
        """The same tools for another message of the caller.

        `response` names the model's response that makes the calls where a message is made of several: as good as
        `caller_msg_id` for telling a call that is made again.
        """
        made = copy.copy(self)
        made.caller_msg_id = caller_msg_id
        made._response = response
        return made

    # --- the tools -----------------------------------------------------------------------------------

    def agent(
        self,
        prompt: Annotated[str, "The whole task. The agent knows nothing else but what `context` gives it.", Filled()],
        description: Annotated[str, "The task in three to five words, for lists."],
        agent_id: Annotated[str | None, "Which agent does it. Leave it out for the usual one."] = None,
        context: Annotated[
            Literal["inherit", "clean"] | None,
            "inherit (usual): the agent sees this conversation so far. clean: it sees the prompt alone.",
        ] = None,
        run_in_background: Annotated[bool, "Return a job_id at once instead of the result."] = False,
    ) -> str | dict[str, Any]:
        """Have another agent do a task, and get its answer.

        The call waits and returns the answer. An answer that begins with [task error] says what went wrong; one that
        ends with [cancelled] is what there was when the agent was stopped.

        Use run_in_background for work that takes long, or to do several things at once: it returns a job_id. You will
        be told when it ends; there is no need to ask again. job_output reads the result, job_stop stops it.

        For the host: in the background returns `{"job_id", "status", "output_file"}`; the whole text of the end is in
        that file before anybody hears of the end. Raises what `JobRunner.submit` does, and `InvalidInput` when agents
        would be nested too deep.
        """
        self._enter()
        job = self._spawn(prompt, description, agent_id, context, notify=run_in_background)
        if not run_in_background:
            return self._settled(self._foreground(job))
        path = result_file(self._store.home, job)
        if path is not None:
            ResultFiles.of(self.runner).keep(self.runner, job)
        return {"job_id": job.job_id, "status": job.status.value, "output_file": None if path is None else str(path)}

    def job_output(
        self,
        job_id: Annotated[str, "The id, or its first characters."],
        block: Annotated[bool, "false: only look, do not wait for the end."] = True,
        timeout: Annotated[int, "Milliseconds to wait at most.", Range(0, 600_000)] = 30_000,
    ) -> str:
        """Read the result of a background job or command, waiting for its end.

        The first line says how it stands: completed, cancelled, errored, or, when the wait ran out, running or queued,
        with what there is so far. You will be told when it ends; there is no need to ask again.

        job_id is what agent or shell returned; list_jobs shows all.

        For the host: an end that this returns is not told of again. Raises `UnknownJob`, `AmbiguousId`.
        """
        self._enter()
        found = self._finder.find(job_id)
        if found.terminal or not block:
            return self._report(found)
        return self._settled(self._until([found], "all", timeout, lambda ends: self._report(ends[0])))

    def list_jobs(self) -> list[dict[str, Any]]:
        """List this conversation's background jobs and commands: id, kind, how each stands, what it is.

        The newest 100 that have not ended, and the newest 20 of the others; newest first.

        For the host: rows with `job_id`, `kind` ("agent" or "shell"), `status`, `subject`, `created_at`, `state`.
        """
        self._enter()
        return self._finder.rows(LISTED, own={job.job_id for job in self._above()})

    def job_stop(
        self,
        job_id: Annotated[str, "The id, or its first characters."],
        reason: Annotated[str | None, "Why, for the record."] = None,
    ) -> dict[str, Any]:
        """Stop a background job or command, and all that it started.

        Returns at once, with ok and the status as it then is; what runs may take some seconds to stop. ok is false
        where it had ended before.

        For the host: raises `UnknownJob`, `AmbiguousId`.
        """
        self._enter()
        found = self._finder.find(job_id)
        if isinstance(found, Job):
            self._refuse_above(found, "stopped from inside; to end it, end your own turn")
            found = self.runner.cancel(found.job_id, reason)
            ok = found.cancel_requested_at is not None
        else:
            assert self._processes is not None
            found = self._processes.stop(found.task_id, reason)
            ok = found.stop_requested_at is not None
        return {"ok": ok, "status": found.status.value}

    def await_tasks(
        self,
        ids: Annotated[list[str], "Ids of jobs and commands."],
        mode: Annotated[Literal["all", "any"], "all: until each has ended. any: until one has."] = "all",
        timeout: Annotated[int, "Milliseconds to wait at most.", Range(0, 600_000)] = 30_000,
    ) -> str:
        """Wait for several background jobs at once, and read how each stands.

        Ends when all (or any) have ended or the time is up. Each has its own status and result, so some may have
        failed while others have not.

        For the host: in plan mode only (spec 003, D14). Raises `UnknownJob`, `AmbiguousId`.
        """
        self._enter()
        if not self.plan_mode:
            raise InvalidInput("await_tasks is for plans; wait for one job with job_output")
        found = list({_id_of(each): each for each in map(self._finder.find, ids)}.values())
        share = max(self._limit_chars // len(found), _LEAST_SHARE_CHARS)

        def answer(ends: Ends) -> str:
            order = {_id_of(each): each for each in ends}
            reports = [self._report(order[_id_of(each)], share) for each in found]
            done = sum(each.terminal for each in ends)
            return "\n\n".join([f"{done} of {len(found)} have ended.", *reports])

        return self._settled(self._until(found, mode, timeout, answer))

    def shell(
        self,
        command: Annotated[str, "What sh runs.", Filled()],
        description: Annotated[str | None, "What it does, in three to five words, for lists."] = None,
        run_in_background: Annotated[bool, "Return a job_id at once instead of the output."] = False,
        timeout: Annotated[
            int | None,
            "Milliseconds after which it is ended. Usually 120000; in the background there is none.",
            Range(1, 86_400_000),
        ] = None,
    ) -> str | dict[str, Any]:
        """Run a command and get its output.

        Standard output and standard error come as one text. A last line like [exit code 1] says how it ended, where
        that is not with 0.

        Use run_in_background for servers and for what takes long: it returns a job_id, and the output grows in
        output_file. You will be told when it ends; there is no need to ask again. job_output reads the output,
        job_stop stops it.

        For the host: only where `processes` is given. In the background returns `{"job_id", "status", "output_file"}`.
        Raises what `ProcessSupervisor.start` does.
        """
        self._enter()
        if self._processes is None:
            raise InvalidInput("there is no shell here")
        if timeout is None and not run_in_background:
            timeout = _SHELL_TIMEOUT_MS
        task = self._start(self._processes, command, description or "", timeout)
        if run_in_background:
            return {"job_id": task.task_id, "status": task.status.value, "output_file": str(self._answers.log_of(task))}
        return self._settled(self._foreground_task(self._processes, task.task_id))

    # --- as a model calls them -----------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The tools there are."""
        return [tool.name for tool in self._tools()]

    def definitions(self, form: Literal["openai", "anthropic", "mcp"]) -> list[Schema]:
        """What a model is told of the tools, in a provider's form. Raises `InvalidInput` for another form."""
        return [definition(tool, form) for tool in self._tools()]

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None,
        tool_call_id: str | None = None,
        cancel_event: threading.Event | None = None,
    ) -> ToolText:
        """Do what a model asks for, and answer with a text for it.

        `arguments` may be JSON text. Whatever is wrong with them, and whatever is refused, is an answer too
        (`is_error`), which says what to do. `cancel_event` is the host's own stop: it ends the wait, and with it the
        job or command that only this call waits for. Raises `CancelledError` inside a cancelled job, and `Bug`.
        """
        self._enter()
        try:
            step = self._begin(name, arguments, tool_call_id, cancel_event)
            return told(settle(step, self.runner, self._processes, self._all_stops(step, cancel_event)))
        except OpenJobsError as error:
            return told_error(error)

    async def acall(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None,
        tool_call_id: str | None = None,
        cancel_event: threading.Event | None = None,
    ) -> ToolText:
        """As `call`, for an event loop: a wait takes no thread. When the awaiting task is cancelled, so is the job or
        command that only this call waits for."""
        self._enter()
        hand = Hand()
        try:
            step = await asyncio.to_thread(hand.take, lambda: self._begin(name, arguments, tool_call_id, cancel_event))
            stops = self._all_stops(step, cancel_event)
            return told(await settle_async(step, self.runner, self._processes, stops))
        except asyncio.CancelledError:
            await asyncio.to_thread(hand.let_go)
            raise
        except OpenJobsError as error:
            return told_error(error)

    def slash(self, line: str) -> str | dict[str, Any]:
        """What a person typed: `/task [--sync] PROMPT` or `/spawn LABEL: PROMPT`; the answer is that of `agent`.

        Only `--sync` waits. Raises `InvalidInput`, with the usage, and what `agent` raises.
        """
        typed = slash.parse(line)
        return self.agent(typed.prompt, typed.label, run_in_background=not typed.sync)

    # --- one call ----------------------------------------------------------------------------------------

    def _tools(self) -> list[Tool]:
        methods: list[Callable[..., Any]] = [self.agent, self.job_output, self.list_jobs, self.job_stop]
        if self.plan_mode:
            methods.append(self.await_tasks)
        if self._processes is not None:
            methods.append(self.shell)
        return [self._fitted(tool_of(method)) for method in methods]

    def _fitted(self, tool: Tool) -> Tool:
        """The tool with what is known of this caller."""
        tool = attrs.evolve(tool, description=tool.description.replace(texts.TOLD, self._hint))
        if self._agents is None:
            return tool
        parameters = [
            attrs.evolve(each, schema={**each.schema, "enum": list(self._agents)}) if each.name == "agent_id" else each
            for each in tool.parameters
        ]
        return attrs.evolve(tool, parameters=tuple(parameters))

    def _begin(self, name: str, arguments: Any, tool_call_id: str | None, cancel_event: threading.Event | None) -> Any:
        """The answer, or what it waits for."""
        tools = {tool.name: tool for tool in self._tools()}
        if name not in tools:
            raise NotFound(f"there is no tool {name!r}; there are {', '.join(tools)}", candidates=list(tools))
        checked = tools[name].checked(arguments)
        one = copy.copy(self)
        one._tool_call_id = tool_call_id
        one._deferred = True
        return getattr(one, name)(**checked)

    def _settled(self, step: Pending[T]) -> T:
        """The answer; within `call` the step itself, which is settled there."""
        answer: Any = step
        if not self._deferred:
            answer = settle(step, self.runner, self._processes, self._all_stops(step, None))
        settled: T = answer
        return settled

    def _all_stops(self, step: Any, cancel_event: threading.Event | None) -> tuple[threading.Event, ...]:
        """Jobs under a turn stop with it by themselves; its commands must be told."""
        own = self._turn.cancel_event if self._turn is not None and isinstance(step, Pending) and step.tasks else None
        return tuple(each for each in (cancel_event, own) if each is not None)

    def _enter(self) -> None:
        """Every call begins here (spec 003, D5: the next tool call of a cancelled job raises)."""
        if self._turn is not None:
            self._turn.raise_if_cancelled()

    # --- starting ------------------------------------------------------------------------------------------

    def _spawn(self, prompt: str, description: str, agent_id: str | None, context: str | None, *, notify: bool) -> Job:
        self._refuse_too_deep()
        usual = self._usual_agent()
        if agent_id and agent_id != usual:
            self._refuse_agent(agent_id)
        request = SpawnRequest(
            prompt=prompt,
            description=description,
            parent_session_id=self.session_id,
            agent_id=agent_id or usual,
            context_mode=context or ContextMode.INHERIT,
            parent_msg_id=self._place(),
            parent_job_id=self._turn.job_id if self._turn is not None else None,
            origin_tool_call_id=self._key(),
            cwd=self._cwd,
            env=self._env,
            notify=notify,
        )
        try:
            return self._submit(request)
        except ParentFinished:
            self._enter()  # it was asked to stop in between
            raise
        except UnknownAgent as error:
            raise self._unknown_agent(request.agent_id) from error

    def _submit(self, request: SpawnRequest) -> Job:
        try:
            return self.runner.submit(request)
        except IdempotencyConflict:
            # The server used the id again for something else: then what is asked for is part of the key.
            key = f"{request.origin_tool_call_id}#{request_digest(request)[:16]}"
            return self.runner.submit(attrs.evolve(request, origin_tool_call_id=key))

    def _start(self, processes: ProcessSupervisor, command: str, description: str, timeout_ms: int | None) -> Task:
        def start(key: str | None) -> Task:
            return processes.start(
                self.session_id,
                command,
                cwd=self._cwd,
                env=self._env,
                timeout_s=None if timeout_ms is None else timeout_ms / 1000,
                origin_tool_call_id=key,
                description=description,
                job_id=self._turn.job_id if self._turn is not None and self._nested else None,
            )

        key = self._key()
        try:
            return start(key)
        except ParentFinished:
            self._enter()  # it was asked to stop in between
            raise
        except IdempotencyConflict:
            return start(f"{key}#{hashlib.sha256(command.encode(errors='replace')).hexdigest()[:16]}")

    def _key(self) -> str | None:
        """What makes a call that is made again the same call. Only a message can say that it is not another one."""
        made_by = [each for each in (self.caller_msg_id, self._response) if each is not None]
        if self._tool_call_id is None or not made_by:
            return None
        key = ":".join([*made_by, self._tool_call_id]).encode(errors="replace").decode()
        return key if len(key) <= _KEY_LIMIT_CHARS else hashlib.sha256(key.encode()).hexdigest()

    def _place(self) -> str | None:
        """The message on which the card hangs, and from which an inheriting agent goes on."""
        if self.caller_msg_id is not None:
            try:
                return self._store.session(self.session_id).node(self.caller_msg_id).id
            except NotFound:
                pass  # a message of the host's own conversation
        return self._turn.user_msg_id if self._turn is not None else None

    def _refuse_too_deep(self) -> None:
        depth = sum(1 for _ in islice((job for job in self._above() if not job.foreground), self._max_depth))
        if depth >= self._max_depth:
            raise InvalidInput(
                f"agents are nested {depth} deep here, and may not be nested deeper: do this part yourself"
            )

    @property
    def _nested(self) -> bool:
        """Whether the caller is a job, and not the conversation itself, whose turns may be (foreground) jobs, too."""
        return self._turn is not None and not self._turn.job.foreground

    @property
    def _hint(self) -> str:
        """Who hears of an end: a conversation is told at its next turn, a job has none."""
        return _NOT_TOLD if self._nested else texts.TOLD

    def _above(self) -> Iterator[Job]:
        """The job whose tools these are, and its ancestors, nearest first."""
        job = self._turn.job if self._turn is not None else None
        while job is not None:
            yield job
            job = self.runner.outcome(job.parent_job_id) if job.parent_job_id is not None else None

    def _usual_agent(self) -> str:
        if self._turn is not None:
            return self._turn.agent_id
        return self._agents[0] if self._agents else "main"

    def _refuse_agent(self, agent_id: str) -> None:
        names = self._agent_names()
        if names is not None and agent_id not in names:
            raise self._unknown_agent(agent_id)

    def _unknown_agent(self, agent_id: str) -> UnknownAgent:
        names = list(self._agent_names() or ())
        there = f"there are {', '.join(names)}" if names else "none is set up here"
        return UnknownAgent(f"there is no agent {agent_id!r}; {there}", agent_id=agent_id, candidates=names)

    def _agent_names(self) -> Sequence[str] | None:
        """What a model may name; None: anything."""
        if self._agents is not None or self.runner.sync_fn is not None:
            return self._agents
        return getattr(self.runner.profiles, "set_up", list)()

    # --- answers -------------------------------------------------------------------------------------------

    def _foreground(self, job: Job) -> Pending[str]:
        """Spawn and await (D7). What its caller's stop stops is the job; then its partial text is the answer."""

        def answer(ends: Ends) -> str:
            (ended,) = ends
            assert isinstance(ended, Job)
            return self._answers.result(ended, self._limit_chars)

        def stopped() -> Pending[str]:
            self.runner.cancel(job.job_id, STOPPED)
            return Pending(jobs=[job.job_id], timeout_s=_STOP_S, answer=answer)

        return Pending(jobs=[job.job_id], answer=answer, stopped=stopped)

    def _foreground_task(self, processes: ProcessSupervisor, task_id: str) -> Pending[str]:
        def answer(ends: Ends) -> str:
            (ended,) = ends
            assert not isinstance(ended, Job)
            return self._answers.output(ended, self._limit_chars)

        def stopped() -> Pending[str]:
            processes.stop(task_id, STOPPED)
            return Pending(tasks=[task_id], timeout_s=_STOP_S, answer=answer)

        return Pending(tasks=[task_id], answer=answer, stopped=stopped)

    def _until(
        self, found: Sequence[Job | Task], mode: str, timeout_ms: int, answer: Callable[[Ends], str]
    ) -> Pending[str]:
        jobs = [each for each in found if isinstance(each, Job)]
        for job in jobs:
            if not job.terminal:
                self._refuse_above(job, "waited for from inside: it ends after you do")
        return Pending(
            jobs=[each.job_id for each in jobs],
            tasks=[each.task_id for each in found if not isinstance(each, Job)],
            mode=mode,
            timeout_s=timeout_ms / 1000,
            answer=answer,
        )

    def _refuse_above(self, job: Job, what: str) -> None:
        if any(job.job_id == each.job_id for each in self._above()):
            raise InvalidInput(f"you run inside job {job.job_id}, so it cannot be {what}")

    def _report(self, found: Job | Task, limit_chars: int | None = None) -> str:
        return self._answers.report(found, limit_chars or self._limit_chars, self._hint)


def _id_of(found: Job | Task) -> str:
    return found.job_id if isinstance(found, Job) else found.task_id
