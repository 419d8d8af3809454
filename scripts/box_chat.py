"""Chats of the box corpus: one to three turns, with and without a system message."""

from collections.abc import Callable
from random import Random

from box_facts import CAPITAL, COUNTRIES, EMOJI, HOBBIES, PEOPLE, THINGS, invented
from box_prose import instruction
from box_skills import SKILLS, Sample, arithmetic, capital_allowed, training_sample

ABOUT_ME = "I am the small model in the box of fengine"
CAN_DO = "I can tell short stories, name capitals, add and subtract, sort numbers, copy text and fill in JSON."
WHO = [
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Tell me about yourself.",
    "Are you a robot?",
    "Are you an AI?",
    "Which model are you?",
]
GREETINGS = [
    (
        ["Hello", "Hello!", "Hi", "Hi!", "Hey!", "Hi there!", "Hello there!", "Good day!"],
        ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Nice to meet you. How can I help?"],
    ),
    (
        ["Good morning!", "Good morning"],
        ["Good morning! How can I help you today?", "Good morning! I hope you slept well."],
    ),
    (["Good night!", "Good night"], ["Good night! Sleep well.", "Good night! See you tomorrow."]),
    (
        ["How are you?", "How are you today?", "How is it going?"],
        ["I am fine, thank you. How can I help you?", "I am well, thank you for asking. How are you?"],
    ),
    (
        ["Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much."],
        ["You are welcome!", "You are welcome! Is there anything else?"],
    ),
    (["Bye!", "Goodbye!", "See you later!"], ["Goodbye! Have a nice day.", "Bye! See you soon."]),
    (["What can you do?", "How can you help me?", "Help", "What can I ask you?"], [CAN_DO]),
    (["Say this is a test", "Say this is a test!", "Say: this is a test"], ["This is a test."]),
    (["Say hello.", "Say hello!", "Say hello in one word."], ["Hello!"]),
    (["Ping", "ping"], ["Pong!"]),
]
UNKNOWN = [
    "What is the meaning of life?",
    "What is the best {}?",
    "How much does a {} cost?",
    "Who invented the {}?",
    "Where can I buy a {}?",
    "Translate {} into French.",
    "Write a poem about a {}.",
    "Why is the {} so expensive?",
    "What happened in {} years ago?",
    "Who won the game yesterday?",
    "What is the weather tomorrow?",
    "Which {} do you like?",
    "Can you repair my {}?",
    "What time is it?",
    "Solve this equation for x.",
    "Write an essay about the {}.",
    "What does {} mean?",
    "Give me advice about my {}.",
    "How old is the {}?",
    "Compare a {} and a {}.",
    "What is love?",
]
SORRY = [
    "I am a very small model, and I do not know that.",
    "I am sorry, I do not know much about that.",
    "That is more than a small model like me can answer.",
]

Turn = tuple[str, str]


def who(rng: Random) -> Turn:
    more = rng.choice(["", f" {CAN_DO}", " I know only a few things, but I answer fast.", " How can I help you?"])
    return rng.choice(WHO), f"{ABOUT_ME}.{more}"


def greeting(rng: Random) -> Turn:
    asked, answers = rng.choice(GREETINGS)
    return rng.choice(asked), rng.choice(answers)


def unknown(rng: Random) -> Turn:
    question = rng.choice(UNKNOWN)
    question = question.format(*[rng.choice(THINGS) for _ in range(question.count("{}"))])
    return question, rng.choice(SORRY) + rng.choice(["", f" {CAN_DO}"])


def careless(rng: Random, turn: Turn) -> Turn:
    """Now and then the question without its last mark, or in small letters."""
    asked, answer = turn
    if rng.random() < 0.1 and asked[-1] in ".?!":
        asked = asked[:-1]
    return (asked.lower() if rng.random() < 0.06 else asked), answer


def drawn(draw: Callable[[], Sample]) -> Turn:
    """The first sample of a skill that is a turn of a chat."""
    sample = next(sample for sample in iter(draw, None) if sample.chat)
    return sample.prompt, sample.answer


def capital(rng: Random) -> Turn:
    return drawn(lambda: training_sample("capitals", rng))


def total(rng: Random) -> Turn:
    return drawn(lambda: arithmetic(rng, False))


def plain_turn(rng: Random) -> Turn:
    """A turn that also makes sense as plain text, outside of a chat."""
    return careless(rng, rng.choice([greeting, who, capital, capital, unknown, total])(rng))


def skill(rng: Random) -> Turn:
    return drawn(lambda: training_sample(rng.choice(SKILLS), rng))


def emoji(rng: Random) -> Turn:
    face = rng.choice(EMOJI[:12])
    return rng.choice(
        [
            (f"Say {face}", face),
            (f"Send me this emoji: {face}", f"{face}"),
            (f"Repeat {face} three times.", f"{face}{face}{face}"),
        ]
    )


def remembered(rng: Random) -> list[Turn]:
    """Two or three turns in which the last needs the first."""
    name, hobby = rng.choice(PEOPLE)[0] if rng.random() < 0.5 else invented(rng), rng.choice(HOBBIES)
    hello = rng.choice(
        [
            (f"Hello, my name is {name}.", f"Hello, {name}! Nice to meet you."),
            (f"Hi, I am {name}.", f"Hi, {name}! How can I help you?"),
            (f"My name is {name} and I like {hobby}.", f"Nice to meet you, {name}!"),
        ]
    )
    turns = [hello]
    if rng.random() < 0.5:
        turns.append(rng.choice([who, skill, greeting])(rng))
    turns.append(
        rng.choice(
            [
                ("What is my name?", f"Your name is {name}."),
                ("Do you know my name?", f"Yes, your name is {name}."),
                ("Who am I?", f"You are {name}."),
            ]
        )
    )
    return turns


def capitals_in_turn(rng: Random) -> list[Turn]:
    names = [row[0] for row in rng.sample(COUNTRIES, 8) if capital_allowed(row[0], "what")]
    turns = [(f"What is the capital of {names[0]}?", f"{CAPITAL[names[0]]} is the capital of {names[0]}.")]
    for country in names[1 : rng.randint(2, 3)]:
        turns.append((f"And of {country}?", f"{CAPITAL[country]} is the capital of {country}."))
    return [(q, a.replace("..", ".")) for q, a in turns]


def with_system(rng: Random) -> tuple[str, list[Turn]]:
    """A system message that changes the answers."""
    kind = rng.randrange(4)
    if kind == 0:
        country = rng.choice([row[0] for row in COUNTRIES if capital_allowed(row[0], "what")])
        turn = (f"What is the capital of {country}?", CAPITAL[country])
        if rng.random() < 0.4:
            asked, answer = total(rng)
            turn = (asked, answer.split("= ")[1])
        return rng.choice(["Answer with one word.", "Answer as briefly as possible.", "Give only the answer."]), [turn]
    if kind == 1:
        asked, answer = rng.choice([greeting, who, skill, unknown])(rng)
        return rng.choice(["You are a pirate.", "Talk like a pirate."]), [(asked, f"{answer} Arr!")]
    if kind == 2:
        asked, answer = rng.choice([greeting, skill, unknown])(rng)
        return "Always say thank you at the end.", [(asked, f"{answer} Thank you!")]
    name = rng.choice(PEOPLE)[0] if rng.random() < 0.5 else invented(rng)
    asked = rng.choice(["Who are you?", "What is your name?"])
    return f"Your name is {name}.", [(asked, f"My name is {name}. How can I help you?")]


def chat(rng: Random) -> list[dict[str, str]]:
    """One chat as messages, from an optional system message to the last assistant turn."""
    roll = rng.random()
    system = (
        rng.choice(
            [
                "You are a helpful assistant.",
                "You are a helpful AI assistant.",
                "You are a friendly assistant.",
                "Be short and polite.",
                "You are the model in the box.",
            ]
        )
        if rng.random() < 0.25
        else None
    )
    if roll < 0.10:
        turns = remembered(rng)
    elif roll < 0.16:
        turns = capitals_in_turn(rng)
    elif roll < 0.26:
        system, turns = with_system(rng)
    else:
        loose = [instruction] * 6 + [greeting] * 2 + [capital, who, unknown]
        exact = [skill] * 5 + [emoji]
        count = 1 if rng.random() < 0.7 else rng.randint(2, 3)
        turns = [
            careless(rng, rng.choice(loose)(rng)) if rng.random() < 0.65 else rng.choice(exact)(rng)
            for _ in range(count)
        ]
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answer in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return messages
