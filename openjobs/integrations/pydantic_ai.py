"""openjobs for agents built with pydantic-ai (extra `pydantic-ai`).

    agent = Agent(model)
    profiles.register("main", job_turn(agent))                      # what runs a job
    await agent.run(prompt, toolsets=[JobTools(tools)])             # what a conversation may start

A turn that is run by `job_turn` has the tools of its job, so that agents can start agents.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any

try:
    from pydantic_ai import Agent, RunContext, messages
    from pydantic_ai.tools import ToolDefinition
    from pydantic_ai.toolsets import AbstractToolset
    from pydantic_ai.toolsets.abstract import ToolsetTool
    from pydantic_core import SchemaValidator, core_schema, to_json
except ImportError as error:
    what = "openjobs.integrations.pydantic_ai needs pydantic-ai: pip install 'openjobs-git[pydantic-ai]'"
    raise ImportError(f"{what} ({error})") from error

from ..errors import CancelledError
from ..jobs import SyncFn, TurnRequest, TurnResult
from ..session.context import ContextItem, chat_messages
from ..tools import AgentTools

#: arguments are checked by the tools themselves, whose answers say what would be right
_ANYTHING = SchemaValidator(core_schema.any_schema())
#: how often a model may send what is no JSON at all
_RETRIES = 3
#: how often a running turn looks whether it is to stop
_LOOK_S = 0.05


class JobTools(AbstractToolset[Any]):
    """`AgentTools` as a toolset of one run.

    The key of a call is the model's response and the call's id in it: a run that is resumed from its messages after a
    crash makes the same calls again, and gets the first jobs. A run that is cancelled takes its foreground agent with
    it. Tools of parallel calls run in parallel. Inside a cancelled job a call raises `openjobs.errors.CancelledError`.
    """

    def __init__(self, tools: AgentTools, *, id: str | None = "openjobs") -> None:  # noqa: A002 (the framework's name)
        self._tools = tools
        self._id = id

    @property
    def id(self) -> str | None:
        return self._id

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        return {
            each["name"]: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=each["name"], description=each["description"], parameters_json_schema=each["inputSchema"]
                ),
                max_retries=_RETRIES,
                args_validator=_ANYTHING,
            )
            for each in self._tools.definitions("mcp")
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> str:
        tools = self._tools.at(self._tools.caller_msg_id, response=_response(ctx.messages))
        # A plain text: what is more than that would be serialised as an object.
        return str(await tools.acall(name, tool_args, ctx.tool_call_id))


def job_turn(
    agent: Agent[Any, Any],
    *,
    deps: Callable[[TurnRequest], Any] = lambda request: None,
    tools: Callable[[TurnRequest], AgentTools | None] = AgentTools.for_turn,
    stream: bool = True,
) -> SyncFn:
    """What runs a job with `agent`: a profile, or a runner's `sync_fn`.

    The agent gets the job's prompt, the context as message history (so say what it is by `instructions`), and `tools`
    beside its own (None: no tools for jobs). A cancel aborts what it waits for, the model's answer included. With
    `stream` the text so far is the job's partial text, kept when it is cancelled; not every model streams. Its output,
    as JSON where it is no text, is the result; its usage is the job's.
    """

    def turn(request: TurnRequest, cancel_event: threading.Event) -> TurnResult:
        made = tools(request)
        toolsets = [] if made is None else [JobTools(made)]
        return asyncio.run(_turn(agent, request, cancel_event, deps(request), toolsets, stream))

    return turn


async def _turn(
    agent: Agent[Any, Any],
    request: TurnRequest,
    cancel_event: threading.Event,
    deps: Any,
    toolsets: Sequence[JobTools],
    stream: bool,
) -> TurnResult:
    run = asyncio.ensure_future(
        agent.run(
            request.prompt,
            message_history=history(request.context),
            deps=deps,
            toolsets=list(toolsets),
            event_stream_handler=_Reporter(request) if stream else None,
        )
    )
    while not run.done():
        await asyncio.wait([run], timeout=_LOOK_S)
        if cancel_event.is_set() and run.cancel():
            await asyncio.wait([run])
    if run.cancelled():
        raise CancelledError(f"job {request.job_id} was asked to stop")
    result = run.result()
    used = result.usage
    return TurnResult(
        final_text=result.output if isinstance(result.output, str) else to_json(result.output).decode(),
        usage={
            "requests": used.requests,
            "tool_calls": used.tool_calls,
            "input_tokens": used.input_tokens,
            "output_tokens": used.output_tokens,
        },
    )


def history(items: Sequence[ContextItem]) -> list[messages.ModelMessage]:
    """What a turn sees of its conversation, as messages of the framework; ended jobs are said to be such."""
    return [_message(each["role"], each["content"]) for each in chat_messages(list(items))]


def _message(role: str, content: str) -> messages.ModelMessage:
    match role:
        case "assistant":
            return messages.ModelResponse(parts=[messages.TextPart(content)])
        case "system":
            return messages.ModelRequest(parts=[messages.SystemPromptPart(content)])
        case _:
            return messages.ModelRequest(parts=[messages.UserPromptPart(content)])


def _response(history: Sequence[messages.ModelMessage]) -> str | None:
    """What tells the response that makes a call from every other one; it is kept with the messages."""
    for message in reversed(history):
        if isinstance(message, messages.ModelResponse):
            return message.provider_response_id or message.timestamp.isoformat()
    return None


class _Reporter:
    """Makes the text that the model has said so far the job's partial text."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request

    async def __call__(self, ctx: RunContext[Any], events: AsyncIterable[messages.AgentStreamEvent]) -> None:
        said = ""
        async for event in events:
            if isinstance(event, messages.PartStartEvent) and isinstance(event.part, messages.TextPart):
                said += event.part.content
            elif isinstance(event, messages.PartDeltaEvent) and isinstance(event.delta, messages.TextPartDelta):
                said += event.delta.content_delta
            else:
                continue
            self._request.partial(said)
