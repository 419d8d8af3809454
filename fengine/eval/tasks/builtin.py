"""The prompts of a run that names none: those of SGLang's offline-engine docs, and what the model in the box can do."""

from typing import Any

TEXTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
    "Write a short, neutral self-introduction for a fictional character. Hello, my name is",
    "Provide a concise factual statement about France's capital city. The capital of France is",
    "Explain possible future trends in artificial intelligence. The future of AI is",
    "Question: What is 27 + 48?\nAnswer:",
    "Sort these numbers: 83, 12, 57, 30\nSorted:",
    "Copy: river moon 42 tiger lamp ->",
    "Sentence: Anna is 31 years old, lives in Oslo and works as a teacher.\nJSON:",
)
CHATS = (
    ("Who are you?",),
    ("What is the capital of Japan?",),
    ("What is 90 - 35?",),
    ("Hello, my name is Tom.", "Hello, Tom! Nice to meet you.", "What is my name?"),
)


def rows(chats: bool) -> tuple[Any, ...]:
    """The built-in rows; `chats` is False for a model without chat template. Pure."""
    roles = ("user", "assistant")
    talks = [[{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)] for turns in CHATS]
    return (*TEXTS, *({"messages": talk} for talk in talks if chats))
