"""What a chat answer may be, as one grammar of all its tokens: reasoning, content and calls.

`answer_form` says what is asked, `xtml_grammar` and `marker_grammar` write it down in a chat
format: the format's parser reads back exactly the content and the calls that were asked for.
Compiles nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stagecoach.errors import RequestError
from stagecoach.request import StructuredOutputsParams
from stagecoach.text.answer_form import answer_form
from stagecoach.text.chat import is_xtml
from stagecoach.text.marker_grammar import marker_answer
from stagecoach.text.output_grammar import output_piece
from stagecoach.text.tokenizer import Tokenizer
from stagecoach.text.xtml_grammar import xtml_answer


def answer_grammar(
    model_type: str,
    tokenizer: Tokenizer,
    *,
    prompt_token_ids: Sequence[int],
    content: StructuredOutputsParams | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    parallel_tool_calls: bool = True,
) -> str | None:
    """The grammar of an answer, in Lark; None if nothing is asked of it.

    Arguments obey a function's parameters where it is `strict`, and where a call is forced; of a
    function that is not strict, what no grammar can say is left out then.

    Args:
        model_type: of the model's config.
        tokenizer: of the checkpoint.
        prompt_token_ids: they say where the answer begins.
        content: what the content must obey.
        tools: functions that may be called, as OpenAI has them.
        tool_choice: "auto", "none", "required", or an object that names a function.
        parallel_tool_calls: whether an answer may call more than once.

    Raises:
        RequestError: names what cannot be written: response_format, tools, tool_choice, or
            messages where the prompt leaves a tool call open.
    """
    try:
        piece = None if content is None else output_piece(content, tokenizer)
    except RequestError as error:
        raise RequestError("response_format", error.reason) from None
    form = answer_form(
        content=piece,
        tools=tools or (),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
    )
    if form is None:
        return None
    write = xtml_answer if is_xtml(model_type) else marker_answer
    return write(tokenizer, prompt_token_ids, form)
