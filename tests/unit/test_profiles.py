"""Profiles: callables, built-ins and command templates (R10)."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from openjobs import GitJobStore, JobRunner, SpawnRequest, errors
from openjobs.agents import Profiles
from openjobs.agents.templates import _KEYS, CommandTemplate, parse_templates, read_templates
from openjobs.errors import Closed, InvalidConfiguration, InvalidInput, UnknownAgent
from openjobs.ids import new_id
from openjobs.jobs import ContextMode, Job, TurnRequest, TurnResult
from tests.support import eventually

PATH = {"PATH": os.environ.get("PATH", os.defpath)}


def request_for(
    prompt: str, *, env: Mapping[str, str] | None = None, cwd: Path | None = None, **more: Any
) -> TurnRequest:
    job = Job(
        job_id=new_id(),
        subject="a job",
        description=prompt,
        agent_id="any",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        parent_session_id="default",
        run_id=new_id(),
    )
    return TurnRequest(
        job=job,
        session_id="default",
        prompt=prompt,
        agent_id="any",
        context_mode=ContextMode.CLEAN,
        parent_msg_id=None,
        user_msg_id=None,
        read_context=list,
        cwd=cwd,
        env=env,
        **more,
    )


def never() -> threading.Event:
    return threading.Event()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def profiles(home: Path) -> Iterator[Profiles]:
    with Profiles(home, environ=PATH) as made:
        yield made


@pytest.fixture
def configure(home: Path) -> Callable[[str], None]:
    def write(text: str) -> None:
        # A new file, so that its signature changes however fast the clock of the file system is.
        (home / "new").write_text(text)
        (home / "new").replace(home / "config.toml")

    return write


def python(code: str) -> str:
    """The `command` line of a template that runs `code` with the prompt as its only argument."""
    return f"command = {[sys.executable, '-c', code, '{prompt}']!r}"


class TestTheRegistry:
    def test_echo_returns_the_prompt(self, profiles: Profiles) -> None:
        """The built-in `echo` returns the prompt, exactly."""
        assert profiles.get("echo")(request_for(" -a\n"), never()) == TurnResult(final_text=" -a\n")

    def test_a_registered_callable_comes_first(self, profiles: Profiles) -> None:
        """A callable that the program registered is found before a built-in of the same name."""
        result = TurnResult(final_text="mine")
        profiles.register("echo", lambda request, cancel_event: result)
        assert profiles.get("echo")(request_for("x"), never()) is result

    @pytest.mark.parametrize("name", ["", "-x", "a b", "a\n", "ä", "x" * 65])
    def test_a_bad_name_is_refused(self, profiles: Profiles, name: str) -> None:
        """A name that could not be asked for on a command line cannot be registered."""
        with pytest.raises(InvalidInput):
            profiles.register(name, lambda request, cancel_event: TurnResult())

    def test_an_unknown_agent_says_what_to_do(self, profiles: Profiles, home: Path) -> None:
        """Without a profile the error names the file, three lines to put there, and `--agent shell`."""
        with pytest.raises(UnknownAgent) as raised:
            profiles.get("main")
        text = str(raised.value)
        assert "--agent shell" in text
        assert str(home / "config.toml") in text
        assert list(raised.value.candidates) == ["claude", "codex", "echo", "gemini", "opencode", "shell"]
        lines = text.splitlines()[-3:]
        assert lines[0] == "[profiles.main]"
        assert parse_templates(_toml("\n".join(lines)), home / "config.toml")["main"].command[0] == "claude"

    def test_a_name_with_a_dot_is_advised_in_quotes(self, profiles: Profiles, home: Path) -> None:
        """The advised lines are right for a name that TOML would split, too."""
        with pytest.raises(UnknownAgent) as raised:
            profiles.get("gpt-5.1")
        advised = "\n".join(str(raised.value).splitlines()[-3:])
        assert list(parse_templates(_toml(advised), home)) == ["gpt-5.1"]

    def test_a_changed_file_is_read_again(self, profiles: Profiles, configure: Callable[[str], None]) -> None:
        """A running host takes a new profile without a restart, and forgets a removed one."""
        with pytest.raises(UnknownAgent):
            profiles.get("one")
        configure('[profiles.one]\ncommand = ["echo", "{prompt}"]')
        assert profiles.get("one")(request_for("hello"), never()).final_text == "hello"
        assert profiles.names() == ["claude", "codex", "echo", "gemini", "one", "opencode", "shell"]
        configure("")
        with pytest.raises(UnknownAgent):
            profiles.get("one")

    def test_a_broken_file_does_not_break_the_built_ins(
        self, profiles: Profiles, configure: Callable[[str], None]
    ) -> None:
        """`--agent shell` works at once, whatever the file says; its own profiles raise."""
        configure("[profiles")
        assert profiles.get("shell") is not None
        for _ in range(2):
            with pytest.raises(InvalidConfiguration, match=r"config\.toml: not TOML"):
                profiles.get("one")

    def test_closed_profiles_start_nothing(self, profiles: Profiles) -> None:
        """After `close` a command is refused, with a typed error."""
        run = profiles.get("shell")
        profiles.close()
        with pytest.raises(Closed):
            run(request_for("true"), never())


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


class TestTheFile:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("profile = 1", "profile is not a known key; allowed: profiles"),
            ("profiles = 1", "profiles is 1; allowed: a table"),
            ("[profiles]\nx = 'ls'", "profiles.x is 'ls'; allowed: a table"),
            ("[profiles.x]", "profiles.x.command is missing"),
            ("[profiles.x]\ncommand = 'claude -p {prompt}'", "profiles.x.command is 'claude"),
            ("[profiles.x]\ncommand = []", "profiles.x.command is []"),
            ("[profiles.x]\ncommand = ['a', 1]", "profiles.x.command is ['a', 1]"),
            ("[profiles.x]\ncommand = ['']", "starts with ''"),
            ("[profiles.x]\ncommand = ['{prompt}']", "starts with '{prompt}'"),
            ("[profiles.x]\ncommand = ['a']", "gives the prompt to nobody"),
            ("[profiles.x]\ncommand = ['a', '{promt}']", "gives the prompt to nobody"),
            ("[profiles.x]\ncommand = ['a', '{prompt}']\nshell = true", "profiles.x.shell is not a known key"),
            (
                "[profiles.x]\ncommand = ['a', '{prompt}']\nstdin = 'file'",
                "profiles.x.stdin is 'file'; allowed: 'none'",
            ),
            ("[profiles.x]\ncommand = ['a', '{prompt}']\ncwd = 'rel'", "profiles.x.cwd is 'rel'"),
            ("[profiles.x]\ncommand = ['a', '{prompt}']\ntimeout_s = 0", "profiles.x.timeout_s is 0"),
            ("[profiles.x]\ncommand = ['a', '{prompt}']\ntimeout_s = true", "profiles.x.timeout_s is True"),
            ("[profiles.x]\ncommand = ['a', '{prompt}']\ntimeout_s = nan", "profiles.x.timeout_s is nan"),
            ("[profiles.x]\ncommand = ['a', '{prompt}']\nenv = {A = 1}", "profiles.x.env.A is 1"),
            (
                "[profiles.x]\ncommand = ['a', '{prompt}']\nenv = {OPENJOBS_HOME = 'x'}",
                "env.OPENJOBS_HOME cannot be set",
            ),
            ("[profiles.shell]\ncommand = ['a', '{prompt}']", "profiles.shell is built in"),
            ("[profiles.'-x']\ncommand = ['a', '{prompt}']", "is not a name"),
            ("[profiles.x]\ncommand = ['sh', '-c', 'claude -p {prompt}']", "run as code"),
            ("[profiles.x]\ncommand = ['/bin/bash', '-lc', 'a \"{prompt}\"']", "run as code"),
            ("[profiles.x]\ncommand = ['env', 'A=1', 'zsh', '-c', '--', 'a {prompt}']", "run as code"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path: Path, text: str, says: str) -> None:
        """An error names the file, the key and what is allowed there."""
        path = tmp_path / "config.toml"
        path.write_text(text)
        with pytest.raises(InvalidConfiguration) as raised:
            read_templates(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert says in str(raised.value)

    def test_bytes_that_are_not_utf8_are_refused(self, tmp_path: Path) -> None:
        """Rubbish in the file is a typed error."""
        path = tmp_path / "config.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(InvalidConfiguration, match="not TOML"):
            read_templates(path)

    def test_a_directory_in_its_place_is_refused(self, tmp_path: Path) -> None:
        """What cannot be read is a typed error, too."""
        with pytest.raises(InvalidConfiguration, match="cannot be read"):
            read_templates(tmp_path)

    def test_the_documented_templates_are_right(self, tmp_path: Path) -> None:
        """Every example of docs/profiles.md can be used as it stands, and its keys are the ones there are."""
        page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()
        examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        assert len(examples) == 3
        for text in examples:
            assert parse_templates(_toml(text), tmp_path)
        assert set(re.findall(r"^\| `(\w+)` \|", page.split("## A command")[1], re.MULTILINE)) == set(_KEYS)

    def test_no_file_means_no_profiles(self, tmp_path: Path) -> None:
        assert read_templates(tmp_path / "config.toml") == {}


class TestArguments:
    def fill(self, *command: str, prompt: str) -> list[str]:
        template = CommandTemplate(name="x", command=command)
        return template.arguments(prompt=prompt, job_id="J", session_id="S", home="/h")

    @pytest.mark.parametrize("prompt", ["", "a b", "$(id) `id` ; id", "\"'", "{job_id}{prompt}", "a\nb"])
    def test_the_prompt_is_one_argument(self, prompt: str) -> None:
        """Whatever the prompt holds, it fills one argument and is not looked at again (R10)."""
        assert self.fill("tool", "--in={session_id}", "{prompt}", prompt=prompt) == ["tool", "--in=S", prompt]

    def test_a_prompt_is_never_an_option(self) -> None:
        """A prompt with a dash in front gets a space where it would be an option; after `--` it is exact (R10)."""
        assert self.fill("tool", "-p", "{prompt}", prompt="--danger") == ["tool", "-p", " --danger"]
        assert self.fill("tool", "--", "{prompt}", prompt="--danger") == ["tool", "--", "--danger"]
        assert self.fill("tool", "--text={prompt}", prompt="--danger") == ["tool", "--text=--danger"]

    def test_other_braces_stay(self) -> None:
        """Only the four placeholders are special."""
        assert self.fill("awk", "{print $1}", "{prompt}", "{}", prompt="x") == ["awk", "{print $1}", "x", "{}"]


class TestCommands:
    def test_shell_runs_the_prompt(self, profiles: Profiles) -> None:
        """The prompt is a script for `sh`; its output is the text, without the last line's end."""
        assert profiles.get("shell")(request_for("echo a; echo b"), never()) == TurnResult(final_text="a\nb")

    def test_a_script_may_start_with_a_dash(self, profiles: Profiles) -> None:
        """A prompt is never taken for an option of `sh`."""
        result = profiles.get("shell")(request_for("-x 2>/dev/null || echo ran"), never())
        assert result == TurnResult(final_text="ran")

    def test_a_bad_exit_is_an_error_with_what_was_said(self, profiles: Profiles) -> None:
        """An exit code other than 0 makes an error of the code and the end of stderr; the text is kept."""
        result = profiles.get("shell")(request_for("echo part; echo why >&2; exit 3"), never())
        assert result == TurnResult(final_text="part", error="exit code 3: why")

    def test_a_long_stderr_is_cut_at_its_front(self, profiles: Profiles) -> None:
        """Of a long stderr the end is in the error, and the cut shows."""
        result = profiles.get("shell")(request_for("seq 1 9999 >&2; exit 1"), never())
        assert result.error is not None
        assert result.error.startswith("exit code 1: …")
        assert result.error.endswith("9998\n9999")
        assert len(result.error) < 2100

    def test_a_signal_is_named(self, profiles: Profiles) -> None:
        """A command that a signal ended is an error with the signal's name."""
        result = profiles.get("shell")(request_for("kill -SEGV $$"), never())
        assert result.error == "ended by SIGSEGV"

    def test_output_keeps_its_tail(self, profiles: Profiles) -> None:
        """Of too much output the end is kept, and how much was cut is said."""
        result = profiles.get("shell")(request_for("head -c 2000000 /dev/zero | tr '\\0' x; echo END"), never())
        assert result.error is None
        assert result.final_text.startswith("[the first 951,428 bytes were cut]\n")
        assert result.final_text.endswith("xEND")

    def test_bytes_that_are_not_text_are_replaced(self, profiles: Profiles) -> None:
        assert profiles.get("shell")(request_for(r"printf 'a\377b'"), never()).final_text == "a\ufffdb"

    def test_the_clients_environment_is_the_whole_one(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A command gets its client's environment and ours about the job, never one variable of the host's."""
        monkeypatch.setenv("HOST_SECRET", "1")
        request = request_for("env", env={**PATH, "MINE": "2", "OPENJOBS_JOB_ID": "old", "OPENJOBS_TASK_ID": "old"})
        with Profiles(home, environ={"HOST_SECRET": "1"}) as profiles:
            text = profiles.get("shell")(request, never()).final_text
        found = dict(line.split("=", 1) for line in text.splitlines())
        assert "HOST_SECRET" not in found
        assert found["MINE"] == "2"
        assert found["OPENJOBS_JOB_ID"] == request.job_id
        assert found["OPENJOBS_SESSION_ID"] == "default"
        assert found["OPENJOBS_HOME"] == str(home)
        assert found.get("OPENJOBS_TASK_ID") != "old"

    def test_without_one_the_given_environment_counts(self, home: Path) -> None:
        """A job without an environment gets the one that the registry was made with."""
        with Profiles(home, environ={**PATH, "BASE": "1"}) as profiles:
            assert profiles.get("shell")(request_for("echo $BASE"), never()).final_text == "1"

    def test_the_sessions_directory_is_made_on_demand(self, profiles: Profiles, home: Path) -> None:
        """Without a directory of its own a job works in its session's `work`."""
        text = profiles.get("shell")(request_for("pwd -P"), never()).final_text
        assert Path(text) == (home / "sessions" / "default" / "work").resolve()
        assert Path(text).stat().st_mode & 0o777 == 0o700

    def test_the_jobs_directory_comes_before(self, profiles: Profiles, tmp_path: Path) -> None:
        text = profiles.get("shell")(request_for("pwd -P", cwd=tmp_path), never()).final_text
        assert Path(text) == tmp_path.resolve()

    def test_a_missing_directory_is_an_error(self, profiles: Profiles, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="working directory"):
            profiles.get("shell")(request_for("true", cwd=tmp_path / "gone"), never())

    def test_a_missing_program_is_named(self, profiles: Profiles, configure: Callable[[str], None]) -> None:
        """A program that is not there is an error that names it, with and without standard input."""
        configure('[profiles.x]\ncommand = ["no-such-thing", "{prompt}"]')
        assert "no-such-thing" in (profiles.get("x")(request_for("a"), never()).error or "")
        configure('[profiles.x]\ncommand = ["no-such-thing"]\nstdin = "prompt"')
        with pytest.raises(InvalidInput, match="no-such-thing"):
            profiles.get("x")(request_for("a"), never())

    def test_the_prompt_on_standard_input_is_exact(
        self, profiles: Profiles, configure: Callable[[str], None], home: Path
    ) -> None:
        """`stdin = "prompt"` takes a prompt of any length and any content, and leaves no copy of it."""
        count = "import sys; print(len(sys.stdin.buffer.read()))"
        configure(f'[profiles.x]\ncommand = {[sys.executable, "-c", count]!r}\nstdin = "prompt"')
        prompt = "-\0" + "x" * 300_000
        assert profiles.get("x")(request_for(prompt), never()).final_text == "300002"
        assert not list(home.rglob("prompt"))

    @pytest.mark.parametrize("prompt", ["a\0b", "x" * 200_000])
    def test_a_prompt_that_cannot_be_an_argument_is_refused(self, profiles: Profiles, prompt: str) -> None:
        """NUL and too long a prompt are typed errors that say what would take them."""
        with pytest.raises(InvalidInput, match='stdin = "prompt"'):
            profiles.get("shell")(request_for(prompt), never())

    def test_a_template_has_its_own_settings(
        self, profiles: Profiles, configure: Callable[[str], None], tmp_path: Path
    ) -> None:
        """`env` and `cwd` of the template win over the job's."""
        configure(
            "[profiles.x]\n"
            + python("import os,sys; print(os.environ['A'], os.getcwd(), sys.argv[1])")
            + f"\nenv = {{A = '1'}}\ncwd = '{tmp_path.resolve()}'"
        )
        result = profiles.get("x")(request_for("p", env={**PATH, "A": "0"}, cwd=Path("/")), never())
        assert result == TurnResult(final_text=f"1 {tmp_path.resolve()} p")

    def test_a_templates_timeout_ends_the_command(self, profiles: Profiles, configure: Callable[[str], None]) -> None:
        configure('[profiles.x]\ncommand = ["sh", "-c", "{prompt}"]\ntimeout_s = 0.2')
        result = profiles.get("x")(request_for("echo on; exec sleep 600"), never())
        assert result == TurnResult(final_text="on", error="timed out after 0.2 s")

    def test_a_cancel_ends_the_command_and_keeps_its_text(self, profiles: Profiles) -> None:
        """A cancel ends the tree; what was written until then is the partial text, and was shown before."""
        shown: list[str] = []
        cancel = threading.Event()

        def show(text: str) -> None:
            shown.append(text)
            cancel.set()

        request = request_for("echo begun; sleep 600; echo never", partial=show)
        with pytest.raises(errors.CancelledError):
            profiles.get("shell")(request, cancel)
        assert (shown[0], shown[-1]) == ("begun\n", "begun")

    def test_a_shutdown_ends_a_command_as_cancelled(self, tmp_path: Path) -> None:
        """Nobody cancelled the job, and it is not completed either."""
        (tmp_path / "home").mkdir(mode=0o700)
        with GitJobStore(tmp_path / "home") as store, Profiles(tmp_path / "home", environ=PATH) as profiles:
            runner = JobRunner(store, profiles=profiles)
            store.create_session("s1")
            ask = SpawnRequest(prompt="echo begun; exec sleep 600", parent_session_id="s1", agent_id="shell")
            job = runner.submit(ask)
            eventually(lambda: runner.get(job.job_id).result_text == "begun\n")
            runner.shutdown(timeout=2)
            ended = store.get(job.job_id)
        assert (ended.status.value, ended.cancel_reason, ended.result_text) == ("cancelled", "shutdown", "begun")

    def test_without_a_home_nothing_is_left(self, tmp_path: Path) -> None:
        """On a store in memory a command runs in a temporary place that is removed."""
        with Profiles(environ=PATH) as profiles:
            result = profiles.get("shell")(request_for("echo x", cwd=tmp_path), never())
        assert result == TurnResult(final_text="x")
        scratch = Path(os.environ["TMPDIR"])
        assert eventually(lambda: not list(scratch.iterdir()))
