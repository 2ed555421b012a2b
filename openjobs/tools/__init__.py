"""The tools that an agent is given: start jobs, read them, stop them (spec 003, D10)."""

from .calls import ToolText
from .tools import AgentTools

__all__ = ["AgentTools", "ToolText"]
