"""Prose of the box corpus: self-introductions, facts, definitions, how-tos, the future of AI and the like.

Every function takes a `random.Random` and returns text.  `document` draws one document as (text, trained) segments:
an instruction that the model only has to read, and the text it has to write.
"""

import json
from random import Random

from box_facts import CAPITAL, CITIES, COUNTRIES, HOBBIES, JOBS, PEOPLE, WELL_KNOWN
from box_skills import capital_allowed
from box_stories import article, story, subject, theme
from box_topics import AI_MORE, AI_OPEN, ANIMALS, HOWTOS, JOKES, MISC, PRESIDENT_MORE, PRESIDENT_OPEN, TOPICS

Segments = list[tuple[str, bool]]


def introduction(rng: Random) -> str:
    """'Hello, my name is …' in the first person, two to five sentences."""
    name, _ = rng.choice(PEOPLE)
    job, where, work = rng.choice(JOBS)
    city, country, known, _ = rng.choice(CITIES)
    hobby, other = rng.sample(HOBBIES, 2)
    age = rng.randint(19, 70)
    start = rng.choice(
        [
            f"Hello, my name is {name}.",
            f"Hello, my name is {name}, and I am {article(job)} {job}.",
            f"Hello, my name is {name} and I am from {city}.",
            f"Hello, my name is {name}. I am {age} years old.",
            f"Hello, my name is {name}, and I live in {city}, {country}.",
        ]
    )
    lines = []
    if "from" not in start and "live" not in start:
        lines.append(
            rng.choice(
                [
                    f"I live in {city}, a city in {country}.",
                    f"I come from {city} in {country}.",
                    f"I was born in {city}, and I still live there.",
                    f"I am from {city}, {country}.",
                ]
            )
        )
    if f"{job}," not in start and not start.endswith(f"{job}."):
        lines.append(
            rng.choice(
                [
                    f"I work as {article(job)} {job}.",
                    f"I am {article(job)} {job} at {where}.",
                    f"I work at {where} as {article(job)} {job}, and I {work}.",
                ]
            )
        )
    else:
        lines.append(rng.choice([f"I work at {where}.", f"Most days I {work}.", f"I {work}, and I like it very much."]))
    pet = rng.choice(["a dog", "a cat", "two cats", "a parrot", "a small garden", "two brothers", "a sister"])
    free = rng.choice(
        [
            f"In my free time I enjoy {hobby}.",
            f"My favorite hobby is {hobby}.",
            f"I like {hobby} with my friends.",
            f"On weekends I enjoy {hobby} and {other}.",
        ]
    )
    end = rng.choice(["I am happy to meet you.", "It is nice to meet you.", f"My city is known for {known}."])
    lines += [line for line in (free, f"I have {pet}.", end) if rng.random() < 0.6] or [free]
    return " ".join([start, *lines])


def third_person(rng: Random) -> str:
    name, he = rng.choice(PEOPLE)
    he_cap, his = he.capitalize(), "her" if he == "she" else "his"
    job, where, work = rng.choice(JOBS)
    city, country, known, _ = rng.choice(CITIES)
    hobby = rng.choice(HOBBIES)
    return " ".join(
        [
            rng.choice(
                [
                    f"{name} is {article(job)} {job} from {city}.",
                    f"{name} lives in {city} and works as {article(job)} {job}.",
                ]
            ),
            rng.choice(
                [
                    f"{he_cap} works at {where}, and {his} task is to {work}.",
                    f"Every day {he} goes to {where} to {work}.",
                ]
            ),
            rng.choice(
                [
                    f"In {his} free time {he} enjoys {hobby}.",
                    f"{he_cap} likes {city} because of {known}.",
                    f"{he_cap} has lived in {country} for {rng.randint(2, 30)} years.",
                    f"{his.capitalize()} hobby is {hobby}.",
                ]
            ),
        ]
    )


def about_country(rng: Random, name: str | None = None) -> str:
    country, capital, region, language = rng.choice([row for row in COUNTRIES if name in (None, row[0])])
    subject_ = country[0].upper() + country[1:]
    lines = [rng.choice([f"{subject_} is a country in {region}.", f"{subject_} is a country that lies in {region}."])]
    more = [
        rng.choice([f"Its capital is {capital}.", f"{capital} is its capital."]),
        rng.choice([f"A main language there is {language}.", f"Many people there speak {language}."]),
    ]
    more += [
        f"{city} is one of its cities and is known for {known}." for city, home, known, _ in CITIES if home == country
    ][:1]
    rng.shuffle(more)
    return " ".join(lines + more)


def about_city(rng: Random, name: str | None = None) -> str:
    city, country, known, _ = rng.choice([row for row in CITIES if name in (None, row[0])])
    region = next(row[2] for row in COUNTRIES if row[0] == country)
    is_capital = CAPITAL[country] == city
    lines = [
        rng.choice([f"{city} is the capital of {country}.", f"{city} is the capital and a major city of {country}."])
        if is_capital
        else f"{city} is a major city in {country}."
    ]
    more = [
        f"It is known for {known}.",
        f"It lies in {region}.",
        "Many visitors come there every year.",
        rng.choice(
            [
                "People enjoy its food, its culture and its history.",
                "It is a center of culture, business and education.",
            ]
        ),
        "Its museums, parks and markets are popular with visitors.",
        "Buses and trains make it easy to travel around the city.",
    ]
    return " ".join(lines + [more[0]] + rng.sample(more[1:], rng.randint(1, 3)))


def capital_statement(rng: Random, name: str | None = None) -> str | None:
    """'The capital of X is Y.' and more; None where that wording is held out for the country."""
    country, capital, region, _ = rng.choice([row for row in COUNTRIES if name in (None, row[0])])
    if not capital_allowed(country, "is"):
        return None
    known = next((row[2] for row in CITIES if row[0] == capital), None)
    more = [rng.choice([f"It lies in {region}.", f"{country[0].upper() + country[1:]} is a country in {region}."])]
    if known:
        more += [
            rng.choice([f"The city is known for {known}.", f"It is known for {known}."]),
            "Many visitors go there every year.",
        ]
    return f"The capital of {country} is {capital}. " + " ".join(rng.sample(more, min(len(more), rng.randint(1, 2))))


def about_topic(rng: Random, index: int | None = None) -> str:
    _, _, lines = TOPICS[rng.randrange(len(TOPICS)) if index is None else index]
    return " ".join([lines[0], *rng.sample(lines[1:], rng.randint(1, len(lines) - 1))])


def about_animal(rng: Random, index: int | None = None) -> str:
    one, many, lives, eats, trait = ANIMALS[rng.randrange(len(ANIMALS)) if index is None else index]
    an = article(one)
    facts = [
        rng.choice([f"{many.capitalize()} live in {lives}.", f"It lives in {lives}."]),
        rng.choice([f"{many.capitalize()} eat {eats}.", f"It eats {eats}."]),
    ]
    first = rng.choice([f"{an.capitalize()} {one} is an animal that {trait}.", f"The {one} {trait}."])
    rng.shuffle(facts)
    return " ".join([first, *facts])


def how_to(rng: Random, index: int | None = None, listed: bool | None = None) -> str:
    """The steps of a how-to, as a numbered list or as a paragraph."""
    _, steps = HOWTOS[rng.randrange(len(HOWTOS)) if index is None else index]
    if listed if listed is not None else rng.random() < 0.5:
        return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    links = ["First, ", *[rng.choice(["Then ", "After that, ", "Next, "]) for _ in steps[1:-1]], "Finally, "]
    return " ".join(link + step[0].lower() + step[1:] for link, step in zip(links, steps, strict=True))


def future_of_ai(rng: Random) -> str:
    return f"The future of AI is {rng.choice(AI_OPEN)} " + " ".join(rng.sample(AI_MORE, rng.randint(2, 4)))


def president(rng: Random) -> str:
    lines = rng.sample(PRESIDENT_MORE, rng.randint(1, 3))
    return f"The president of the United States is {rng.choice(PRESIDENT_OPEN)} " + " ".join(lines)


def weather(rng: Random) -> str:
    city = rng.choice(CITIES)[0]
    sky = rng.choice(["sunny", "cloudy", "rainy", "windy", "clear", "foggy"])
    day = rng.choice(["Today", "Tomorrow"])
    is_ = "is" if day == "Today" else "will be"
    low = rng.randint(-3, 18)
    advice = {
        "sunny": "It is a good day for a walk in the park.",
        "cloudy": "It will probably stay dry.",
        "rainy": "Do not forget your umbrella.",
        "windy": "Hold on to your hat.",
        "clear": "You will be able to see the stars at night.",
        "foggy": "Please drive slowly.",
    }
    return (
        f"{day} the weather in {city} {is_} {sky}, with temperatures between {low} and {low + rng.randint(4, 12)} "
        f"degrees. {advice[sky]}"
    )


def countries_list(rng: Random, count: int) -> str:
    """A numbered list in alphabetical order: even the likeliest choices then never repeat."""
    rows = sorted(rng.sample(WELL_KNOWN, count))
    return "\n".join(f"{i}. {country} - {CAPITAL[country]}" for i, country in enumerate(rows, 1))


def counting(rng: Random) -> str:
    start, step = rng.choice([(1, 1), (1, 1), (0, 2), (0, 5), (0, 10), (rng.randint(1, 80), 1)])
    joint = rng.choice([", ", " "])
    return joint.join(str(start + step * i) for i in range(rng.randint(8, 20)))


def capital_json(country: str) -> str:
    """The record of a capital, for cities whose population is in the table."""
    city, _, _, people = next(row for row in CITIES if row[1] == country and row[3])
    return json.dumps({"name": city, "population": int(people)})


def ask(rng: Random, prompt: str, text: str, forms: bool = True) -> Segments:
    """An instruction followed by its text, as question and answer or with only a blank or a new line between them."""
    if forms and rng.random() < 0.25:
        form = rng.choice(["Question: {}\nAnswer:", "Q: {}\nA:", "Human: {}\n\nAssistant:", "User: {}\nAssistant:"])
        return [(form.format(prompt), False), (" " + text, True)]
    left, right = rng.choice([("", " "), (" ", ""), ("", "\n"), ("\n", ""), ("", " "), (" ", "")])
    return [(prompt + left, False), (right + text, True)]


def instruction(rng: Random) -> tuple[str, str]:
    """An instruction in words and the text that answers it, for plain documents and for chat turns."""
    kind = rng.randrange(12)
    if rng.random() < 0.04:
        country = rng.choice([row[1] for row in CITIES if row[3]])
        form = rng.choice(
            [
                "Give me the information of the capital of {} in the JSON format.",
                "Please generate the information of the capital of {} in the JSON format.",
                "Here is the information of the capital of {} in the JSON format.",
            ]
        )
        return form.format(country), capital_json(country)
    if kind == 0:
        what = subject(rng)
        text = story(rng, what)
        if rng.random() < 0.3:
            what, text = theme(rng)
        form = rng.choice(
            [
                "Write a short story about {}.",
                "Tell me a story about {}.",
                "Write a story about {}.",
                "Please tell me a short story about {}.",
            ]
        )
        return form.format(what), text
    if kind == 1:
        return rng.choice(["Tell me a story.", "Write a short story.", "Please tell me a short story."]), story(rng)
    if kind == 2:
        return rng.choice(
            [
                "Please introduce yourself.",
                "Introduce yourself as a fictional character.",
                "Write a short, neutral self-introduction for a fictional character.",
                "Write a short self-introduction.",
            ]
        ), introduction(rng)
    if kind == 3:
        city = rng.choice(CITIES)[0]
        form = rng.choice(
            [
                "Please provide information about {} as a major global city:",
                "Tell me about {}.",
                "Please provide information about {}:",
                "What is {} known for?",
                "Describe the city of {}.",
            ]
        )
        return form.format(city), about_city(rng, city)
    if kind == 4:
        country = rng.choice(COUNTRIES)[0]
        return rng.choice(["Tell me about {}.", "Write about {}.", "Give me some facts about {}."]).format(
            country
        ), about_country(rng, country)
    if kind in (5, 6):
        i = rng.randrange(len(TOPICS))
        form = rng.choice(["What is {}?", "Explain {}.", "Tell me about {}.", "Explain {} in simple words."])
        return form.format(TOPICS[i][1]), about_topic(rng, i)
    if kind == 7:
        i = rng.randrange(len(ANIMALS))
        one, many = ANIMALS[i][:2]
        return rng.choice(
            [f"Tell me about {many}.", f"What is {article(one)} {one}?", f"Describe the {one}."]
        ), about_animal(rng, i)
    if kind == 8:
        i = rng.randrange(len(HOWTOS))
        return rng.choice(["How do I {}?", "How can I {}?", "Explain how to {}."]).format(HOWTOS[i][0]), how_to(rng, i)
    if kind == 9:
        return rng.choice(
            [
                "Explain possible future trends in artificial intelligence.",
                "What is the future of AI?",
                "Write about the future of artificial intelligence.",
            ]
        ), future_of_ai(rng)
    if kind == 10:
        count = rng.randint(2, 10)
        return rng.choice(
            [f"List {count} countries and their capitals.", f"Name {count} countries and their capitals."]
        ), countries_list(rng, count)
    if rng.random() < 0.3:
        return rng.choice(
            ["What is the job of the president of the United States?", "Who is the president of the United States?"]
        ), president(rng)
    return rng.choice(["Tell me a joke.", "Please tell me a joke.", "Do you know a joke?"]), " ".join(rng.choice(JOKES))


def document(rng: Random) -> Segments:
    """One document of prose, without its bos and eos."""
    roll = rng.random()
    if roll < 0.30:
        prompt, text = instruction(rng)
        return ask(rng, prompt, text)
    if roll < 0.36:  # an instruction and the beginning of its answer, both given
        country = rng.choice(COUNTRIES)[0]
        form = rng.choice(
            [
                "Provide a concise factual statement about {}{}s capital city.",
                "Give a short fact about the capital city of {}.",
                "State one fact about {}{}s capital.",
            ]
        )
        apostrophe = rng.choice("'’")
        prompt = form.format(*([country, apostrophe] if form.count("{}") == 2 else [country]))
        text = capital_statement(rng, country)
        return [(prompt, False), (" " + text, True)] if text else [(about_country(rng), True)]
    if roll < 0.50:
        return [(introduction(rng), True)]
    if roll < 0.70:
        return [(story(rng, once=rng.random() < 0.6), True)]
    if roll < 0.71:
        return [(story(rng, plots=rng.randint(2, 4)), True)]
    choices = [
        future_of_ai,
        future_of_ai,
        president,
        about_country,
        about_city,
        about_city,
        capital_statement,
        capital_statement,
        about_topic,
        about_topic,
        about_topic,
        about_animal,
        weather,
        third_person,
        counting,
    ]
    text = rng.choice([*choices, None])
    if text is None:
        return [(rng.choice(MISC), True)]
    return [(text(rng) or about_topic(rng), True)]
