"""What a model and its engine allow of a request, by whichever way it comes: a router or `LLM`.

Invariant: what passes can run, and everything else is an InvalidRequestError with the field as the caller names it.
"""

import secrets
from dataclasses import replace

from kvrelay.core.errors import ContextLengthError, InvalidRequestError
from kvrelay.core.generation.sampling_params import SamplingParams


def checked_sampling(sampling: SamplingParams, *, vocab_size: int, max_num_seqs: int) -> SamplingParams:
    """Returns the parameters with a `top_k` that is at most the vocabulary. With many biases it takes long, so it is
    done once for all prompts that have the same ones; `sampling_of_prompt` does what remains for each."""
    sampling.validate_but_lengths(vocab_size=vocab_size)
    if sampling.n > max_num_seqs:
        raise InvalidRequestError(
            f"n is {sampling.n}, but at most {max_num_seqs} sequences run at a time (max_num_seqs)", field="n"
        )
    return sampling if sampling.top_k <= vocab_size else replace(sampling, top_k=vocab_size)


def sampling_of_prompt(checked: SamplingParams, *, max_tokens: int) -> SamplingParams:
    """Returns parameters that `checked_sampling` has returned for one prompt: with its `max_tokens`, and a seed. Raises
    InvalidRequestError if the lengths are wrong."""
    seed = secrets.randbits(63) if checked.seed is None else checked.seed
    sampling = replace(checked, max_tokens=max_tokens, seed=seed)
    sampling.validate_lengths()
    return sampling


def too_long(max_model_len: int, reason: str, *, field: str) -> ContextLengthError:
    """Returns the error in OpenAI's words, by which clients such as LiteLLM know a conversation that has to be
    shortened, and from which some read the model's length."""
    message = f"This model's maximum context length is {max_model_len} tokens, but {reason}"
    return ContextLengthError(message, field=field)


def room_for_output(num_prompt_tokens: int, max_model_len: int, *, field: str, prompt: str = "the prompt") -> int:
    """Returns how many tokens are left for the output, at least one. Raises ContextLengthError, in which `prompt` says
    which one it is about."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        reason = f"{prompt} has {num_prompt_tokens} tokens, which leave none for the output"
        raise too_long(max_model_len, reason, field=field)
    return room
