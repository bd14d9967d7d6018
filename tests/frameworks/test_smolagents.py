"""smolagents: the executor that runs a code agent's Python in a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from smolagents import ChatMessage, CodeAgent, MessageRole, Model, tool
from smolagents.local_python_executor import ExecutionTimeoutError

from fumehood import CallFailed, Client
from fumehood.integrations.smolagents import ANSWER, FumehoodExecutor


class Scripted(Model):
    """Scripted model that writes one program after the other."""

    def __init__(self, *programs: str) -> None:
        super().__init__(model_id="scripted")
        self.programs = list(programs)
        self.seen: list[str] = []

    def generate(self, messages: Any, *args: Any, **named: Any) -> ChatMessage:
        self.seen = [str(message.content) for message in messages]
        program = self.programs.pop(0)
        return ChatMessage(MessageRole.ASSISTANT, f"Thought: go\n<code>\n{program}\n</code>")


@pytest.fixture(scope="module")
def executor() -> Iterator[FumehoodExecutor]:
    with FumehoodExecutor(image="python-data") as made:
        yield made


def agent(executor: FumehoodExecutor, *programs: str, **named: Any) -> CodeAgent:
    named = {"tools": [], **named}
    return CodeAgent(model=Scripted(*programs), executor=executor, verbosity_level=0, **named)


def test_howto_page_example_runs_unchanged(page: Callable[[str], Any], sessions: Any) -> None:
    model = Scripted("n = 6\nprint('half')", "final_answer(n * 7)")
    assert page("use-from-smolagents")["ask"](model, "6 * 7?") == 42
    assert "half" in model.seen[-1]


@pytest.mark.parametrize(
    "answer",
    [None, "it's \\ ä\n", [1, {"a": [True, 1.5]}], "x" * 3_000_000],
    ids=lambda a: repr(a)[:20],
)
def test_final_answer_round_trips_for_every_json_type(
    executor: FumehoodExecutor, answer: Any
) -> None:
    program = f"a = {answer!r}" if len(repr(answer)) < 99 else "a = 'x' * 3_000_000"
    assert agent(executor, f"{program}\nfinal_answer(a)").run("?") == answer


def test_program_error_is_shown_to_the_model_and_the_run_continues(
    executor: FumehoodExecutor,
) -> None:
    made = agent(executor, "print('seen')\n1 / 0", "final_answer({1, 2})", "final_answer('on')")
    assert made.run("?") == "on"
    said = " ".join(made.model.seen)
    assert "ZeroDivisionError" in said
    assert "seen" in said
    assert "tolist" in said or "not JSON serializable" in said


def test_refused_program_clears_the_previous_print_output(client: Client) -> None:
    session = client.create_session(image="python")
    with FumehoodExecutor(session_id=session.id) as executor:
        assert executor("print('before')").logs == "before\n"
        client.end_session(session.id)
        with pytest.raises(CallFailed, match="has ended"):
            executor("print('after')")
    assert executor.state["_print_outputs"] == ""


def test_variables_and_tools_are_sent_into_the_sandbox(executor: FumehoodExecutor) -> None:
    @tool
    def double(n: int) -> int:
        """Double.

        Args:
            n: A number.
        """
        return 2 * n

    made = agent(executor, "final_answer([double(n), text, other])", tools=[double])
    given = {"n": 21, "text": 'it\'s \\ "ä"\n', "other": {"a": [None, True]}}
    assert made.run("?", additional_args=given) == [42, given["text"], given["other"]]
    with pytest.raises(TypeError, match="JSON"):
        executor.send_variables({"n": object()})
    with pytest.raises(TypeError, match="no Tool"):
        executor.send_tools({"other": made})


def test_executor_returns_value_logs_and_figures(executor: FumehoodExecutor) -> None:
    ran = executor("print('x' * 50_000)\n[1, 2]")
    assert (ran.output, len(ran.logs), ran.is_final_answer) == ([1, 2], 50_001, False)
    assert executor("{1}").output == "{1}"
    assert executor("x = 1").output is None
    figure = executor("import matplotlib.pyplot as p\n_ = p.plot([1, 2])\np.show()").output
    assert figure.format == "PNG"


def test_timed_out_program_raises_execution_timeout_error() -> None:
    with (
        FumehoodExecutor(image="python", timeout_seconds=0.5) as executor,
        pytest.raises(ExecutionTimeoutError),
    ):
        executor("print('a')\nwhile True: pass")
    assert executor.state["_print_outputs"] == "a\n"


def test_forged_pickle_answer_is_never_unpickled_on_the_host(executor: FumehoodExecutor) -> None:
    """The host parses the sandbox's answer file as JSON and never unpickles it."""
    with pytest.raises(ValueError, match=r"decode|Expecting"):
        executor(f"import pickle\nopen({ANSWER!r}, 'wb').write(pickle.dumps(print))")
    assert executor("1 + 1").output == 2
