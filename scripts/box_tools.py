"""Chats with tools for the box corpus: drawn tools, questions that need them, calls, results and answers.

    python scripts/box_tools.py --show 5

What a tool does is an ability; its name, its parameters' names, its description and its schema's form are drawn, and so
are the tools beside it.  A held-out case has arguments that occur in training in no phrasing; with `unseen`, its tools
have names that no training chat has.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from box_chat import SORRY, UNKNOWN, careless, greeting, who
from box_chat import capital as capital_turn
from box_chat import total as total_turn
from box_facts import CAPITAL, COUNTRIES, LETTERS_WORDS, PEOPLE, THINGS, invented
from box_skills import JSON_CITIES, LINES, held

END = "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\n' }}{% endif %}"
    "{{ '<tools>\n' }}{% for tool in tools %}"
    "{{ (tool['function'] if 'function' in tool else tool) | tojson + '\n' }}{% endfor %}{{ '</tools><|end|>\n' }}"
    "{% endif %}{% for message in messages %}"
    "{% if message['role'] in ['tool', 'function'] %}"
    "{% if loop.first or loop.previtem['role'] not in ['tool', 'function'] %}{{ '<|user|>\n' }}"
    "{% else %}{{ '\n' }}{% endif %}"
    "{{ '<tool_response>\n' + message['content'] | trim + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] not in ['tool', 'function'] %}{{ '<|end|>\n' }}{% endif %}"
    "{% elif message['tool_calls'] or message['function_call'] %}{{ '<|assistant|>\n' }}"
    "{% if message['content'] %}{{ message['content'] | trim + '\n' }}{% endif %}"
    "{% for call in message['tool_calls'] or [message['function_call']] %}"
    "{% set f = call['function'] if 'function' in call else call %}{% set a = f['arguments'] %}"
    "{{ '<tool_call>\n{\"name\": \"' + f['name'] + '\", \"arguments\": ' + (a if a is string else a | tojson)"
    " + '}\n</tool_call>' + ('' if loop.last else '\n') }}{% endfor %}{{ '<|end|>\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

Message = dict[str, Any]


class Case(NamedTuple):
    """A chat with tools; its assistant's turns are what is learned."""

    kind: str
    tools: list[dict[str, Any]]
    messages: list[Message]


class Step(NamedTuple):
    """One need of a tool: arguments by the ability's own words, the result, and what it says."""

    ability: str
    asked: str
    arguments: dict[str, Any]
    result: str
    answer: str


class Ability(NamedTuple):
    names: str
    says: str
    parameters: dict[str, tuple[str, str, str]]  # own word: (names, type, descriptions)
    step: Callable[[Random], Step]


# --- rendering --------------------------------------------------------------------------------------------------------


def said(message: Message) -> str:
    """What an assistant's turn is as text."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    lines = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return "\n".join([message["content"]] * bool(message.get("content")) + lines)


def segments(case: Case, forced: bool = False) -> list[tuple[str, bool]]:
    """The chat as the template writes it, without bos; `forced`: the first calls as a list, its bracket given."""
    parts: list[tuple[str, bool]] = []
    messages, head = list(case.messages), ""
    if case.tools:
        head = messages.pop(0)["content"].strip() + "\n" if messages[0]["role"] == "system" else ""
        tools = "".join(json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in case.tools)
        head = f"<|system|>\n{head}<tools>\n{tools}</tools>{END}\n"
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            text = said(message)
            if message.get("given"):
                head += f"<|assistant|>\n{text}{END}\n"
                continue
            if forced and (calls := message.get("tool_calls")):
                text = json.dumps([call["function"] for call in calls], ensure_ascii=False)[1:]
                head, forced = head + "<|assistant|>\n[", False
            else:
                head += "<|assistant|>\n"
            parts += [(head, False), (text + END, True)]
            head = "\n"
        elif role == "tool":
            head += "\n" if i and messages[i - 1]["role"] == "tool" else "<|user|>\n"
            head += f"<tool_response>\n{message['content'].strip()}\n</tool_response>"
            head += "" if i + 1 < len(messages) and messages[i + 1]["role"] == "tool" else f"{END}\n"
        else:
            head += f"<|{role}|>\n{message['content'].strip()}{END}\n"
    return parts


# --- abilities --------------------------------------------------------------------------------------------------------


def _number(rng: Random) -> int | float:
    roll = rng.random()
    if roll < 0.06:
        return round(rng.uniform(0, 99), rng.randint(1, 2))
    if roll < 0.12:
        return -rng.randint(1, 999)
    return rng.randint(0, 10 ** rng.choice([1, 2, 2, 2, 3, 3, 4]) - 1)


def _shown(rng: Random, value: Any, key: str) -> str:
    """A result as tools give them: as text, or in an object."""
    return str(value) if rng.random() < 0.65 else json.dumps({rng.choice(["result", key]): value}, ensure_ascii=False)


def capital(rng: Random) -> Step:
    country = rng.choice(COUNTRIES)[0] if rng.random() < 0.9 else invented(rng)
    city = CAPITAL.get(country, "") if rng.random() < 0.75 else ""
    city = city or invented(rng)
    asked = rng.choice(
        ["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital city of {}.",
         "Tell me the capital of {}.", "I need the capital of {}.", "Use the tool to find the capital of {}.",
         "What's the capital of {}?", "Please look up the capital of {}."]
    ).format(country)  # fmt: skip
    end = "" if country.endswith(".") else "."
    shown = _shown(rng, city, "capital")
    return Step("capital", asked, {"country": country}, shown, f"{city} is the capital of {country}{end}")


OPERATIONS = {
    "add": ("+", ["What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "Calculate {a} + {b}.",
                  "What is the sum of {a} and {b}?", "How much is {a} plus {b}?", "What is {a}+{b}?"]),
    "subtract": ("-", ["What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.",
                       "How much is {a} minus {b}?", "What is {a}-{b}?"]),
    "multiply": ("*", ["What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.", "Multiply {a} and {b}.",
                       "Calculate {a} * {b}.", "How much is {a} times {b}?", "What is the product of {a} and {b}?"]),
    "divide": ("/", ["What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.", "Calculate {a} / {b}.",
                     "How much is {a} divided by {b}?"]),
}  # fmt: skip


def _value(rng: Random, sign: str, a: float, b: float) -> float:
    """Mostly what is right, sometimes another number, so that the result is read and not guessed."""
    if rng.random() < 0.3 or (sign == "/" and not b):
        return _number(rng)
    right = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[sign]
    return int(right) if right == int(right) and rng.random() < 0.85 else round(right, 3)


def operation(name: str) -> Callable[[Random], Step]:
    def step(rng: Random) -> Step:
        (sign, forms), a, b = OPERATIONS[name], _number(rng), _number(rng)
        value = _value(rng, sign, a, b)
        asked = rng.choice(forms).format(a=a, b=b)
        shown = _shown(rng, value, name)
        return Step(name, asked, {"a": a, "b": b}, shown, f"{a} {sign} {b} = {value}")

    return step


def calculate(rng: Random) -> Step:
    signs = [rng.choice("+-*/") for _ in range(rng.choice([1, 1, 2, 3]))]
    expression = str(abs(_number(rng))) + "".join(f" {sign} {abs(_number(rng))}" for sign in signs)
    value = _number(rng)
    asked = rng.choice(["What is {}?", "Calculate {}.", "Evaluate {}.", "Compute {}", "How much is {}?"])
    shown = _shown(rng, value, "value")
    return Step("calculate", asked.format(expression), {"expression": expression}, shown, f"{expression} = {value}")


def sort_numbers(rng: Random) -> Step:
    numbers = [rng.randint(0, 99) if rng.random() < 0.9 else rng.randint(-99, 999) for _ in range(rng.randint(2, 7))]
    text, ordered = ", ".join(map(str, numbers)), sorted(numbers)
    asked = rng.choice(
        ["Sort these numbers: {}", "Sort {}.", "Sort these numbers from smallest to largest: {}",
         "Put these numbers in order: {}", "Please sort the numbers {}."]
    ).format(text if rng.random() < 0.8 else " ".join(map(str, numbers)))  # fmt: skip
    answer = ", ".join(map(str, ordered))
    shown = rng.choice([answer, json.dumps(ordered), json.dumps({"sorted": ordered}), json.dumps({"result": ordered})])
    return Step("sort", asked, {"numbers": numbers}, shown, answer)


def _text(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.35:
        return rng.choice(LETTERS_WORDS)
    if roll < 0.5:
        return invented(rng)
    if roll < 0.6:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
    if roll < 0.9:
        return " ".join(rng.choice(LETTERS_WORDS) for _ in range(rng.randint(2, 5)))
    return rng.choice([line for line in rng.sample(LINES, 20) if len(line) < 60 and '"' not in line] or ["hello"])


def _word(rng: Random) -> str:
    return rng.choice(LETTERS_WORDS) if rng.random() < 0.5 else invented(rng).lower()


def _quoted(rng: Random, text: str) -> str:
    return rng.choice(["'{}'", '"{}"', "{}", "{}"]).format(text)


def count_letters(rng: Random) -> Step:
    word = _word(rng)
    count = len(word) if rng.random() < 0.7 else rng.randint(1, 30)
    asked = rng.choice(["How many letters does {} have?", "How many letters are in {}?", "Count the letters of {}.",
                        "Count the letters in the word {}."]).format(_quoted(rng, word))  # fmt: skip
    shown = _shown(rng, count, "count")
    return Step("count_letters", asked, {"word": word}, shown, f"{word} has {count} letters.")


def count_letter(rng: Random) -> Step:
    word = _word(rng)
    letter = rng.choice(word)
    count = word.count(letter) if rng.random() < 0.7 else rng.randint(0, 20)
    asked = rng.choice(["How many times does {l} occur in {w}?", "How many {l} are in {w}?",
                        "How often is the letter {l} in {w}?", "Count the letter {l} in {w}."])  # fmt: skip
    shown = _shown(rng, count, "count")
    asked = asked.format(l=_quoted(rng, letter), w=_quoted(rng, word))
    return Step("count_letter", asked, {"word": word, "letter": letter}, shown, f"{letter} occurs {count} times.")


CHANGES: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "reverse": (lambda t: t[::-1], ["Reverse {}", "Reverse the text {}", "Write {} backwards", "Spell {} backwards"]),
    "upper": (str.upper, ["Write {} in capital letters", "Make {} upper case", "Convert {} to uppercase"]),
    "copy": (str, ["Copy {}", "Repeat {}", "Repeat this text: {}", "Echo {}", "Copy this text: {}"]),
}


def change(name: str) -> Callable[[Random], Step]:
    def step(rng: Random) -> Step:
        text = _text(rng)
        done, forms = CHANGES[name]
        changed = done(text) if rng.random() < 0.8 else _text(rng)
        asked = rng.choice(forms).format(_quoted(rng, text))
        return Step(name, asked, {"text": text}, _shown(rng, changed, "text"), changed)

    return step


def _city(rng: Random) -> str:
    return rng.choice(JSON_CITIES) if rng.random() < 0.85 else invented(rng)


SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "clear", "foggy", "warm", "cold", "rain", "snow"]


def weather(rng: Random) -> Step:
    city, sky, degrees, arguments = _city(rng), rng.choice(SKIES), rng.randint(-20, 42), {}
    asked = rng.choice(
        ["What is the weather in {}?", "How is the weather in {}?", "What's the weather like in {}?",
         "Is it warm in {}?", "How warm is it in {} today?", "Tell me the weather in {}.", "Will it rain in {}?",
         "What is the temperature in {}?", "What is the weather like in {} today?", "Check the weather in {}."]
    ).format(city)  # fmt: skip
    if rng.random() < 0.3:
        unit = rng.choice(["celsius", "fahrenheit"])
        asked = f"{asked[:-1]} in {unit.capitalize() if rng.random() < 0.6 else unit}{asked[-1]}"
        arguments = {"unit": unit}
    told = rng.choice([sky, f"{sky}, {degrees} degrees", f"{degrees} degrees", f"{degrees}", f"{degrees} and {sky}"])
    shown = told
    if rng.random() < 0.35:
        values = {rng.choice(["temperature", "temp", "degrees"]): degrees, rng.choice(["condition", "sky"]): sky}
        values = dict(rng.sample(sorted(values.items()), rng.randint(1, 2)))
        told = ", ".join(map(str, values.values()))
        shown = json.dumps(({rng.choice(["city", "location"]): city} if rng.random() < 0.5 else {}) | values)
    return Step("weather", asked, {"city": city, **arguments}, shown, f"The weather in {city}: {told}.")


def clock(rng: Random) -> Step:
    city, told = _city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    asked = rng.choice(["What time is it in {}?", "What is the time in {}?", "Tell me the time in {}."]).format(city)
    return Step("clock", asked, {"city": city}, _shown(rng, told, "time"), f"It is {told} in {city}.")


def now(rng: Random) -> Step:
    told = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    asked = rng.choice(["What time is it?", "What time is it now?", "What is the time?", "Tell me the time."])
    return Step("now", asked, {}, _shown(rng, told, "time"), f"It is {told}.")


def fact(noun: str) -> Callable[[Random], Step]:
    def step(rng: Random) -> Step:
        country = rng.choice(COUNTRIES)[0]
        told = rng.choice(COUNTRIES)[3] if noun == "language" else str(rng.randint(1, 1400) * 10 ** rng.randint(3, 6))
        asked = rng.choice(
            [f"Which language do people speak in {country}?", f"What is the language of {country}?"]
            if noun == "language"
            else [f"How many people live in {country}?", f"What is the population of {country}?"]
        )
        return Step(noun, asked, {"country": country}, _shown(rng, told, noun), f"The {noun} of {country}: {told}.")

    return step


DONE = ["ok", "done", "saved", "sent", '{"status": "ok"}', '{"ok": true}', "success", "true"]


def send(rng: Random) -> Step:
    name, text = rng.choice(PEOPLE)[0] if rng.random() < 0.6 else invented(rng), _text(rng)
    asked = rng.choice(["Send {n} the message: {t}", "Send a message to {n}: {t}", "Write to {n}: {t}"])
    return Step("send", asked.format(n=name, t=text), {"to": name, "text": text}, rng.choice(DONE), "Done.")


def save(rng: Random) -> Step:
    name, age, city = rng.choice(PEOPLE)[0] if rng.random() < 0.6 else invented(rng), rng.randint(18, 90), _city(rng)
    asked = rng.choice(
        [
            "Save {n}, {a}, from {c}.",
            "Add the person {n}, aged {a}, of {c}.",
            "{n} is {a} years old and lives in {c}. Save this.",
            "Store this: {n} from {c} is {a}.",
        ]
    )
    values = {"name": name, "age": age, "city": city}
    return Step("save", asked.format(n=name, a=age, c=city), values, rng.choice(DONE), "Done.")


def look_up(rng: Random) -> Step:
    query, told = _text(rng).strip(".!?"), rng.choice(LINES) if rng.random() < 0.7 else _text(rng)
    asked = rng.choice(["Search for {}", "Look up {}", "Search the web for {}", "Find {}"]).format(_quoted(rng, query))
    return Step("search", asked, {"query": query}, told, told)


NOUNS = ["price", "age", "color", "size", "weight", "height", "owner", "status", "address", "score", "speed", "depth",
         "length", "name", "date", "number", "rank", "value", "title", "author", "stock", "balance"]  # fmt: skip


def lookup_of(noun: str) -> Ability:
    """A tool that tells one thing of another: what it does is known from its name alone."""

    def step(rng: Random) -> Step:
        roll = rng.random()
        key = rng.choice(THINGS) if roll < 0.5 else invented(rng) if roll < 0.8 else f"{rng.randint(1, 9999)}"
        told = rng.choice([str(_number(rng)), invented(rng), rng.choice(LETTERS_WORDS), f"{rng.randint(1, 99)} cm"])
        form = rng.choice(["What is the {} of {}?", "Get the {} of {}.", "Tell me the {} of {}.", "Find the {} of {}."])
        asked = form.format(noun, key)
        return Step(f"get_{noun}", asked, {"key": key}, _shown(rng, told, noun), f"The {noun} of {key}: {told}.")

    names = f"get_{noun} {noun} {noun}_of find_{noun} lookup_{noun} get{noun.capitalize()} fetch_{noun} query_{noun}"
    says = f"Get the {noun} of something.|Returns the {noun}.|Looks up the {noun} of an item|The {noun} of a thing"
    words = "item id name key object thing user product order_id item_id"
    return Ability(names, says, {"key": (words, "string", "Of what.|The item|The name of the thing")}, step)


_PAIRS = "a,b x,y first,second left,right number1,number2 num1,num2 n1,n2 i,j first_number,second_number p,q".split()
_NUMBER = "The first number.|The second number.|A number|number|An operand"
_COUNTRY = ("country country_name nation name land of", "string",
            "The country.|Name of the country|A country, such as Peru|country name")  # fmt: skip
_CITY = ("city location place town city_name where", "string",
         "The city.|Name of the city|The city, e.g. Paris|city name|The place")  # fmt: skip
_TEXT = ("text string value message content s input", "string", "The text.|A text|Any string|What to change")
_WORD = ("word text string value s w", "string", "The word.|A word|The text to look at")


def _operation(name: str, names: str, says: str) -> Ability:
    number = ("", "number", _NUMBER)
    return Ability(names, says, {"a": number, "b": number}, operation(name))


ABILITIES: dict[str, Ability] = {
    "capital": Ability(
        "get_capital capital_of lookup_capital find_capital getCapital capital country_capital get_country_capital "
        "get_capital_city capital_city query_capital fetch_capital capital_lookup tell_capital",
        "Get the capital of a country.|Returns the capital city of the given country.|Look up which city is the "
        "capital of a country|Find a country's capital.|The capital of a country|Capital city of a country.",
        {"country": _COUNTRY}, capital),
    "add": _operation(
        "add", "add add_numbers sum plus addition add_two_numbers calculate_sum sum_numbers addNumbers get_sum",
        "Add two numbers.|Adds a and b.|Returns the sum of two numbers.|Sum of two numbers|Add numbers|Addition"),
    "subtract": _operation(
        "subtract", "subtract minus difference sub subtract_numbers subtraction get_difference calculate_difference",
        "Subtract two numbers.|Subtracts the second number from the first.|Returns the difference of two numbers."
        "|Difference of two numbers|Subtraction"),
    "multiply": _operation(
        "multiply", "multiply times product mul multiply_numbers multiplication get_product calculate_product",
        "Multiply two numbers.|Multiplies a and b.|Returns the product of two numbers.|Product of two numbers"
        "|Multiplication"),
    "divide": _operation(
        "divide", "divide division quotient div divide_numbers get_quotient calculate_quotient",
        "Divide two numbers.|Divides the first number by the second.|Returns the quotient of two numbers."
        "|Quotient of two numbers|Division"),
    "calculate": Ability(
        "calculate calculator calc evaluate compute eval_expression math evaluate_expression run_calculation",
        "Evaluate an expression.|Calculates an arithmetic expression.|A calculator.|Compute the value of an expression",
        {"expression": ("expression expr formula input query calculation", "string",
                        "The expression.|An arithmetic expression|For example 2 + 2")}, calculate),
    "sort": Ability(
        "sort_numbers sort sort_list order_numbers sorted sortNumbers sort_values number_sorter sort_ascending",
        "Sort numbers.|Sorts a list of numbers from smallest to largest.|Returns the numbers in order|Sort a list.",
        {"numbers": ("numbers values list items nums data array", "array", "The numbers.|Numbers to sort|A list")},
        sort_numbers),
    "count_letters": Ability(
        "count_letters letter_count word_length length_of count_characters countLetters get_length letters_in",
        "Count the letters of a word.|Returns how many letters a word has.|Length of a word|How many letters there are",
        {"word": _WORD}, count_letters),
    "count_letter": Ability(
        "count_letter count_char letter_occurrences count_occurrences how_often occurrences_of find_letter",
        "Count how often a letter occurs in a word.|Returns the count of one letter.|Occurrences of a letter",
        {"word": _WORD, "letter": ("letter char character symbol c", "string", "The letter.|One character")},
        count_letter),
    "reverse": Ability(
        "reverse reverse_text reverse_string backwards reversed text_reverse reverseText flip_text mirror",
        "Reverse a text.|Returns the text backwards.|Reverses a string|Write a text backwards",
        {"text": _TEXT}, change("reverse")),
    "upper": Ability(
        "upper uppercase to_upper make_uppercase toUpperCase capital_letters upper_case text_upper",
        "Make a text upper case.|Returns the text in capital letters.|Converts to uppercase",
        {"text": _TEXT}, change("upper")),
    "copy": Ability(
        "copy echo repeat copy_text repeat_text echo_text say copy_string parrot",
        "Copy a text.|Returns the text as it is.|Repeats a text|Echo the text.",
        {"text": _TEXT}, change("copy")),
    "weather": Ability(
        "get_weather weather get_current_weather current_weather weather_in fetch_weather getWeather check_weather "
        "weather_lookup get_forecast lookup_weather temperature_in",
        "Get the weather of a city.|Get the current weather in a given location|Returns the weather in a city."
        "|Weather of a place|Current temperature and sky|Determine weather in my location",
        {"city": _CITY, "unit": ("unit units scale temperature_unit", "enum", "The unit.|celsius or fahrenheit")},
        weather),
    "clock": Ability(
        "get_time time_in current_time local_time get_local_time clock getTime fetch_time time_lookup",
        "Get the time in a city.|Returns the local time of a place.|Current time in a city|What time it is there",
        {"city": _CITY}, clock),
    "now": Ability("now get_now time_now current_clock what_time getNow", "The time.|Returns the time now.", {}, now),
    "language": Ability(
        "get_language language_of spoken_language find_language country_language", "Get the language of a country."
        "|Returns which language people speak in a country|Main language", {"country": _COUNTRY}, fact("language")),
    "population": Ability(
        "get_population population population_of count_people country_population", "Get the population of a country."
        "|Returns how many people live in a country|Number of people", {"country": _COUNTRY}, fact("population")),
    "send": Ability(
        "send_message send message write_to send_text sendMessage notify send_email", "Send a message to someone."
        "|Sends a text to a person.|Writes a message",
        {"to": ("to recipient receiver person name user", "string", "Who gets it.|The recipient"),
         "text": ("text message body content", "string", "The message.|What to say")}, send),
    "save": Ability(
        "save_person add_person store_person create_user savePerson register add_contact save_contact",
        "Save a person.|Stores name, age and city of a person.|Adds a person to the list",
        {"name": ("name person person_name full_name", "string", "The name.|Name of the person"),
         "age": ("age years age_in_years", "integer", "The age.|Age in years"),
         "city": ("city town place home", "string", "The city.|Where the person lives")}, save),
    "search": Ability(
        "search web_search search_web look_up find google query search_documents retrieve",
        "Search the web.|Searches for a query.|Find information|Looks something up",
        {"query": ("query q text question keywords search_query", "string", "The query.|What to search for")}, look_up),
    **{f"get_{noun}": lookup_of(noun) for noun in NOUNS},
}  # fmt: skip
MAIN = [name for name in ABILITIES if not name.startswith("get_")]
SKILLS = ("capital", "add", "subtract", "multiply", "sort", "count_letters", "count_letter", "reverse", "copy")
LIKE = [  # of which no two are offered together: a question for one could be meant for the other
    {"add", "subtract", "multiply", "divide", "calculate"},
    {"clock", "now"},
    {"search", "copy"},
]


# --- tools ------------------------------------------------------------------------------------------------------------


class Tool(NamedTuple):
    ability: str
    name: str
    words: dict[str, str]  # of the ability's own words for parameters
    spec: dict[str, Any]


def unseen_name(name: str) -> bool:
    return held(f"tool-name:{name}")


def _varied(rng: Random, name: str) -> str:
    """Names that nobody has seen, so that they are copied."""
    roll, other = rng.random(), invented(rng).lower()
    if roll < 0.3:
        return rng.choice([f"{other}_{name}", f"{name}_{other}", f"{name}{rng.randint(1, 99)}", f"{name}_tool"])
    if roll < 0.5:
        return rng.choice([f"my_{name}", f"{name}_v{rng.randint(1, 9)}", f"do_{name}", f"{name}-{other}"])
    if roll < 0.7:
        return "".join(part.capitalize() for part in name.split("_"))
    return rng.choice([other, f"{other}_{invented(rng).lower()}", f"tool_{rng.randint(0, 99)}", other.upper()])


def make_tool(rng: Random, key: str, unseen: bool) -> Tool:
    ability = ABILITIES[key]
    names = [name for name in ability.names.split() if unseen_name(name) == unseen] or ability.names.split()
    name = names[0] if names[0] == ability.names.split()[0] and rng.random() < 0.25 else rng.choice(names)
    plain = name
    if not unseen and rng.random() < 0.3:
        name = _varied(rng, name)
        name = plain if unseen_name(name) else name
    words: dict[str, str] = {}
    pair = iter(rng.choice(_PAIRS).split(","))
    for own, (pool, _, _) in ability.parameters.items():
        free = [word for word in pool.split() if word not in words.values()]
        words[own] = (free[0] if rng.random() < 0.4 else rng.choice(free)) if free else next(pair)
        if not unseen and own not in ("a", "b", "unit") and rng.random() < 0.08:
            words[own] = f"{words[own]}_{invented(rng).lower()}"
    described, titled, integer = rng.random() < 0.6, rng.random() < 0.1, rng.choice(["integer", "number"])
    properties: dict[str, Any] = {}
    for own, (_, kind, says) in ability.parameters.items():
        schema: dict[str, Any] = {"type": {"enum": "string", "number": integer}.get(kind, kind)}
        if titled:
            schema = {"title": words[own].replace("_", " ").title()} | schema
        if described:
            schema["description"] = rng.choice(says.split("|"))
        if kind == "array":
            schema["items"] = {"type": rng.choice(["integer", "number"])}
        if kind == "enum":
            schema["enum"] = ["celsius", "fahrenheit"]
        if rng.random() < 0.15:
            schema = dict(reversed(schema.items()))
        properties[words[own]] = schema
    if "unit" in words and rng.random() < 0.6:
        del properties[words.pop("unit")]
    required = [words[own] for own in words if own != "unit"]
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.3:
        parameters = {"properties": properties, "required": required, "type": "object"}
    if rng.random() < 0.25:
        parameters["additionalProperties"] = False
    if not properties and rng.random() < 0.5:
        parameters = {"type": "object", "properties": {}}
    spec: dict[str, Any] = {"name": name, "description": rng.choice(ability.says.split("|")), "parameters": parameters}
    if rng.random() < 0.12 and plain.lower() in name.lower():
        del spec["description"]
    if rng.random() < 0.1:
        spec["strict"] = rng.random() < 0.5
    if rng.random() < 0.15:
        spec = dict(sorted(spec.items()))
    return Tool(key, name, words, {"type": "function", "function": spec})


def _clash(key: str, chosen: list[str]) -> bool:
    """Whether a question for one of the chosen could be meant for this one; a calculator takes every sum."""
    if key == "calculate" or "calculate" in chosen:
        return bool({key, *chosen} & {"add", "subtract", "multiply", "divide"})
    return any(key in group and group & set(chosen) for group in LIKE[1:])


def draw_tools(rng: Random, needed: list[str], banned: set[str], unseen: bool) -> dict[str, Tool]:
    """Tools with the needed abilities and up to three others, in any order."""
    keys = list(dict.fromkeys(needed))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3]) if keys else rng.randint(1, 3)):
        key = rng.choice(MAIN if rng.random() < 0.8 else list(ABILITIES))
        if key not in keys and key not in banned and not _clash(key, keys):
            keys.append(key)
    if len(keys) > len(set(needed)) + 3:
        keys = keys[:4]
    rng.shuffle(keys)
    tools: dict[str, Tool] = {}
    for key in keys:
        tool = make_tool(rng, key, unseen)
        while any(tool.name == other.name for other in tools.values()):
            tool = make_tool(rng, key, unseen)
        tools[key] = tool
    return tools


# --- chats ------------------------------------------------------------------------------------------------------------


def _step(rng: Random, key: str, hold: bool) -> Step:
    while True:
        step = ABILITIES[key].step(rng)
        content = step.asked if key == "capital" else json.dumps(step.arguments, sort_keys=True)  # all countries occur
        if not step.arguments or held(f"tool:{key}:{content}") == hold:
            return step


def _call(tool: Tool, step: Step) -> dict[str, Any]:
    """Of a unit that the tool has not nothing is said."""
    arguments = {tool.words[own]: value for own, value in step.arguments.items() if own in tool.words}
    return {"type": "function", "function": {"name": tool.name, "arguments": arguments}}


def _calls(tools: dict[str, Tool], steps: list[Step]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [_call(tools[step.ability], step) for step in steps]}


def _failed(rng: Random, step: Step) -> Step:
    """Now and then a tool tells of an error."""
    if rng.random() >= 0.04:
        return step
    error = rng.choice(["not found", "timeout", "no such entry", "service unavailable", f"unknown: {_text(rng)[:20]}"])
    shown = rng.choice([f"Error: {error}", json.dumps({"error": error})])
    return step._replace(result=shown, answer=f"That did not work: {error}")


def _rounds(tools: dict[str, Tool], asked: str, rounds: list[list[Step]], answer: str) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": asked}]
    for steps in rounds:
        messages.append(_calls(tools, steps))
        messages += [{"role": "tool", "content": step.result} for step in steps]
    return [*messages, {"role": "assistant", "content": answer}]


def _joined(first: str, second: str) -> str:
    """Two questions as one."""
    if first[-1] == "?" and second.startswith("What is "):
        return f"{first[:-1]} and what is {second[8:]}"
    return f"{first} {second}" if first[-1] in ".?!" else f"{first}. {second}"


def single(rng: Random, hold: bool, unseen: bool, key: str | None = None) -> Case:
    key = key or rng.choice(rng.choice([SKILLS, MAIN, list(ABILITIES)]))
    step = _failed(rng, _step(rng, key, hold))
    tools = draw_tools(rng, [key], set(), unseen)
    asked, _ = careless(rng, (step.asked, ""))
    if asked != step.asked.rstrip(".?!") and asked != step.asked and not step.asked.lower() == step.asked:
        asked = step.asked  # small letters would change what is to be copied
    if asked == step.asked and rng.random() < 0.06:
        asked = rng.choice([f"Please: {asked}", f"{asked} Use a tool.", f"Hi! {asked}", f"{asked} Thanks!"])
    messages = _rounds(tools, asked, [[step]], step.answer)
    return _case(rng, key, tools, messages, hold)


def parallel(rng: Random, hold: bool, unseen: bool) -> Case:
    first, second = (rng.choice(rng.choice([SKILLS, MAIN])) for _ in range(2))
    while (
        _clash(second, [first]) or "sort" in (first, second) or first in ("send", "search", "copy", "reverse", "upper")
    ):
        first, second = (rng.choice(rng.choice([SKILLS, MAIN])) for _ in range(2))
    one, two = _step(rng, first, hold), _step(rng, second, hold)
    tools = draw_tools(rng, [first, second], set(), unseen)
    steps, asked = [one, two], _joined(one.asked, two.asked)
    if first == second == "capital" and rng.random() < 0.6:
        asked = rng.choice(["What are the capitals of {} and {}?", "What is the capital of {} and of {}?"]).format(
            one.arguments["country"], two.arguments["country"])  # fmt: skip
    if first == second == "weather" and rng.random() < 0.8:
        steps = [s._replace(arguments={"city": s.arguments["city"]}) for s in steps]
        asked = rng.choice(["What is the weather in {} and {}?", "What is the weather in {} and in {}?",
                            "Is it warmer in {} or in {}?"]).format(*(s.arguments["city"] for s in steps))  # fmt: skip
    answer = f"{one.answer}{'' if one.answer[-1] in '.?!' else '.'} {two.answer}"
    if not hold and rng.random() < 0.2:  # where only the first call was taken, the second is made next
        messages = _rounds(tools, asked, [[step] for step in steps], answer)
        messages[1]["given"] = True
        return _case(rng, "parallel", tools, messages, hold)
    return _case(rng, "parallel", tools, _rounds(tools, asked, [steps], answer), hold)


def chain(rng: Random, hold: bool, unseen: bool) -> Case:
    """The second call needs the first one's result."""
    if rng.random() < 0.2:
        first = _step(rng, "capital", hold)
        city, country = first.answer.split(" is the capital of ")[0], first.arguments["country"]
        key = rng.choice(["count_letters", "reverse", "upper"])
        word = "word" if key == "count_letters" else "text"
        told = str(len(city)) if key == "count_letters" else CHANGES[key][0](city)
        answer = f"{city} has {told} letters." if key == "count_letters" else told
        second = Step(key, "", {word: city}, _shown(rng, told, "value"), answer)
        forms = {
            "count_letters": ["How many letters does the capital of {} have?", "Count the letters of {}'s capital."],
            "reverse": ["Reverse the capital of {}.", "Write the capital of {} backwards."],
            "upper": ["Write the capital of {} in capital letters.", "Write the capital of {} in upper case."],
        }
        tools = draw_tools(rng, ["capital", key], set(), unseen)
        asked = rng.choice(forms[key]).format(country)
        return _case(rng, "chain", tools, _rounds(tools, asked, [[first], [second]], answer), hold)
    if rng.random() < 0.5:
        first = _step(rng, "capital", hold)
        city = first.answer.split(" is the capital of ")[0]
        second = weather(rng) if rng.random() < 0.65 else clock(rng)
        old = second.arguments["city"]
        tools = draw_tools(rng, ["capital", second.ability], set(), unseen)
        second = second._replace(
            arguments={"city": city}, result=second.result.replace(old, city), answer=second.answer.replace(old, city)
        )
        country = first.arguments["country"]
        asked = rng.choice(
            ["What is the weather in the capital of {}?", "How is the weather in the capital of {}?",
             "What is the capital of {} and what is the weather there?", "Find the capital of {} and its weather.",
             "What is the capital of {}, and how is the weather there?"]
            if second.ability == "weather"
            else ["What time is it in the capital of {}?", "What is the time in the capital of {}?",
                  "What is the capital of {} and what time is it there?"]
        ).format(country)  # fmt: skip
        answer = f"{first.answer} {second.answer}"
        return _case(rng, "chain", tools, _rounds(tools, asked, [[first], [second]], answer), hold)
    keys = [rng.choice(["add", "subtract", "multiply"]) for _ in range(2)]
    first = _step(rng, keys[0], hold)
    value = float(first.answer.split(" = ")[1])
    value = int(value) if value == int(value) and "." not in first.answer.split(" = ")[1] else value
    sign, other = OPERATIONS[keys[1]][0], _number(rng)
    result = _value(rng, sign, value, other)
    second = Step(keys[1], "", {"a": value, "b": other}, str(result), f"{value} {sign} {other} = {result}")
    then = {"add": f"add {other}", "subtract": f"subtract {other}", "multiply": f"multiply by {other}"}[keys[1]]
    start = {"add": "Add {a} and {b}", "subtract": "Subtract {b} from {a}", "multiply": "Multiply {a} by {b}"}[keys[0]]
    asked = f"{start.format(**first.arguments)}, then {then}."
    if keys == ["add", "multiply"] and rng.random() < 0.4:
        asked = f"What is ({first.arguments['a']} + {first.arguments['b']}) * {other}?"
    tools = draw_tools(rng, keys, set(), unseen)
    return _case(rng, "chain", tools, _rounds(tools, asked, [[first], [second]], second.answer), hold)


def none(rng: Random, hold: bool, unseen: bool) -> Case:
    """Questions that the model answers by itself: of no tool, or of none that is there."""
    arithmetic = set(OPERATIONS) | {"calculate"}
    roll = rng.random()
    if roll < 0.5:
        (asked, answer), banned = rng.choice([greeting, who])(rng), {"search", "copy", "send"}
        if asked.startswith(("Say", "Repeat")):
            banned |= {"upper"}
    elif roll < 0.65:
        (asked, answer), banned = capital_turn(rng), {"capital", "search"}
    elif roll < 0.85:
        (asked, answer), banned = total_turn(rng), arithmetic | {"search"}
    else:
        questions = [q for q in UNKNOWN if "{}" not in q] + ["What is the weather in {}?", "What time is it in {}?"]
        asked = rng.choice(questions).format(_city(rng))
        answer = rng.choice(SORRY)
        banned = {"weather", "clock", "now", "search", "calculate"}
    tools = draw_tools(rng, [], banned, unseen)
    while not tools:
        tools = draw_tools(rng, [], banned, unseen)
    return _case(
        rng, "none", tools, [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], hold
    )


def more(rng: Random, hold: bool, unseen: bool) -> Case:
    """A second question after the first one's answer."""
    first, second = (rng.choice(rng.choice([SKILLS, MAIN])) for _ in range(2))
    while _clash(second, [first]):
        second = rng.choice(SKILLS)
    tools = draw_tools(rng, [first, second], set(), unseen)
    messages: list[Message] = []
    for key in (first, second):
        step = _step(rng, key, hold)
        messages += _rounds(tools, step.asked, [[step]], step.answer)
        if rng.random() < 0.2:
            asked, answer = greeting(rng) if rng.random() < 0.5 else who(rng)
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return _case(rng, "more", tools, messages, hold)


SYSTEMS = ["You are a helpful assistant.", "You are a helpful AI assistant.", "Use the tools.", "Be short and polite.",
           "You are a helpful assistant with tools.", "Answer with the help of the tools.",
           "You are a friendly assistant.", "You can call functions."]  # fmt: skip


def _case(rng: Random, kind: str, tools: dict[str, Tool], messages: list[Message], hold: bool) -> Case:
    if rng.random() < (0.2 if hold else 0.3):
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}, *messages]
    return Case(kind, [tool.spec for tool in tools.values()], messages)


def training_case(rng: Random) -> Case:
    roll = rng.random()
    make = (
        single if roll < 0.56 else none if roll < 0.70 else chain if roll < 0.82 else parallel if roll < 0.93 else more
    )
    return make(rng, False, False)


def training_segments(rng: Random) -> list[tuple[str, bool]]:
    return segments(training_case(rng), forced=rng.random() < 0.06)


KINDS: dict[str, Callable[[Random, bool, bool], Case]] = {
    **{key: (lambda rng, hold, unseen, key=key: single(rng, hold, unseen, key)) for key in SKILLS},
    "weather": lambda rng, hold, unseen: single(rng, hold, unseen, "weather"),
    "any": single,
    "parallel": parallel,
    "chain": chain,
    "none": none,
}


def held_out(kind: str, count: int, seed: int = 1, unseen: bool = False) -> Iterator[Case]:
    """Held-out chats of a kind; each of their assistant's turns is a case."""
    rng = Random(f"tools:{kind}:{seed}:{unseen}")
    for _ in range(count):
        yield KINDS[kind](rng, True, unseen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = Random(args.seed)
    for _ in range(args.show):
        print("".join(f"[{text}]" if trained else text for text, trained in training_segments(rng)) + "\n---")


if __name__ == "__main__":
    main()
