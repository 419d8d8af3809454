"""Short stories of the box corpus: a hero, a place and one of a dozen plots, each sentence drawn from variants."""

from random import Random

from box_facts import JOBS, PEOPLE, THINGS, _words
from box_topics import ANIMALS

ADJECTIVES = _words(
    "small, young, old, brave, shy, clever, curious, kind, quiet, cheerful, hungry, lonely, gentle, bold"
)
CREATURES = _words("""
fox, rabbit, bear, mouse, owl, cat, dog, turtle, hedgehog, frog, squirrel, duck, horse, goat, penguin, elephant, lion,
robot, dragon, monkey, wolf, sparrow
""")
ROLES = _words("""
boy, girl, farmer, baker, sailor, gardener, painter, fisherman, shepherd, king, queen, wizard, clockmaker, teacher,
miller, princess, musician, librarian, traveler
""")
# heroes and friends have different names, so that a story never mixes them up
HERO_NAMES, FRIEND_NAMES = PEOPLE[::2], PEOPLE[1::2]
FEMALE_ROLES = {"girl", "queen", "princess"}
MALE_ROLES = {"boy", "king", "wizard", "fisherman"}
PLACES = _words("""
in a quiet village by the sea, in a green valley, in a small town in the hills, in a deep forest, in an old castle,
in a house by the river, in a snowy mountain village, near a busy harbor, on a sunny island, in a far country,
in a little house at the edge of the woods, on a windy plain, behind a high garden wall, in a lighthouse on the coast
""")
TREASURES = _words("""
golden key, silver coin, old map, blue stone, small lamp, red kite, wooden box, music box, shiny shell, warm scarf,
little bell, glass ball, paper boat, strange seed, old book, broken watch
""")
MORALS = [
    "From that day on, {n} knew that kindness always comes back.",
    "And {n} never forgot that day.",
    "From then on they were the best of friends.",
    "That night {n} slept well and dreamed of the next adventure.",
    "And everyone in the place still tells the story today.",
    "{n} learned that even someone small can do great things.",
    "And they all lived happily ever after.",
    "Since then, {n} has always shared what {he} has.",
    "{n} smiled, because {he} had learned to be patient.",
    "After that, {n} was never afraid again.",
]

# Each plot: a list of sentences, each a list of variants.
PLOTS: list[list[list[str]]] = [
    [  # something found belongs to somebody
        [
            "One morning {n} found {a_t} in the grass.",
            "One day {he} found {a_t} on the path.",
            "While {he} was walking, {n} saw {a_t} under a tree.",
        ],
        [
            "It was beautiful, but {he} knew that it belonged to someone.",
            "{He} wanted to keep it, but {he} thought of the one who had lost it.",
        ],
        [
            "So {n} went from door to door and asked everyone.",
            "So {he} walked all day to look for the owner.",
            "{He} asked the baker, the miller and the old {c2}.",
        ],
        ["At last {he} met {f}, who was looking sadly at the ground.", "In the evening {he} came to the house of {f}."],
        [
            "{f} was so happy that {fhe} began to dance.",
            '"You found it!" said {f}. "Thank you, {n}!"',
            "{f} thanked {n} and gave {him} a basket of apples.",
        ],
    ],
    [  # a lost friend
        [
            "One evening {his} friend {f} did not come home.",
            "One day {f}, {his} best friend, was lost in the snow.",
            "One foggy day {n} could not find {his} friend {f}.",
        ],
        [
            "{n} took a lamp and went out into the dark.",
            "{He} was afraid, but {he} went out to look.",
            "{n} put on a warm coat and followed the footprints.",
        ],
        [
            "{He} called and called, but only the wind answered.",
            "An old {c2} showed {him} the way to the river.",
            "{He} crossed a bridge and climbed a steep hill.",
        ],
        ["At last {he} heard a small voice behind a rock.", "Then {he} saw a little light between the trees."],
        ["It was {f}, cold and tired but safe.", '"I knew that you would come," said {f}.'],
        ["Together they walked home and drank hot soup.", "They went home together and sat by the fire."],
    ],
    [  # a garden or a seed
        ["One spring {n} planted a strange seed behind the house.", "One day a traveler gave {n} a tiny seed."],
        [
            "Every day {he} gave it water and sang to it.",
            "{He} watered it every morning, but nothing grew.",
            "Everyone laughed and said that it would never grow.",
        ],
        ["{n} did not give up.", "{He} waited through the rain and the sun.", "{He} was patient."],
        [
            "Then one morning there was a tall tree with silver leaves.",
            "One night it rained, and in the morning a great flower stood there.",
            "After many weeks a small green leaf came out of the ground.",
        ],
        ["People came from far away to see it.", "Birds came to sing in it, and children came to play under it."],
        ["{n} gave everyone a seed to take home.", "{n} was proud and happy."],
    ],
    [  # afraid of something
        ["{n} was afraid of the dark.", "{n} was afraid of deep water.", "{n} was afraid of the high bridge."],
        ["All the others laughed, and that made {him} sad.", "{He} never told anyone about it."],
        ["One day {his} little friend {f} called for help.", "Then one night {f} was in danger and cried out."],
        ["{n} did not think about fear and ran as fast as {he} could.", "{n} took a deep breath and went to help."],
        ["{He} held out a rope and pulled {f} to safety.", "{He} took {f} by the hand and brought {fhim} home."],
        ['"You are the bravest of us all," said {f}.', "Everyone cheered for {n}."],
    ],
    [  # a contest
        [
            "Every summer there was a great race around the lake.",
            "One day the king called everyone to a contest.",
            "One day there was a contest to build the best boat.",
        ],
        ["{f} was the fastest of all and laughed at {n}.", "Nobody believed that {n} could win."],
        ["{n} practiced every day, in the sun and in the rain.", "{n} worked quietly and did not talk much."],
        [
            "On the day of the contest {f} was too proud and made a mistake.",
            "On the great day {f} stopped to rest and fell asleep.",
            "On the great day {n} stopped to help {f}, who had fallen.",
        ],
        ["Step by step {n} went on, and in the end {he} won.", "{n} came first, and everyone was surprised."],
        ["{He} shared the prize, a big cake, with {f}.", '"Slow and steady is best," said {n} with a smile.'],
    ],
    [  # a storm
        ["One night a great storm came from the sea.", "One autumn a terrible storm came over the land."],
        [
            "The wind blew down the old bridge, and nobody could cross the river.",
            "The lamp of the lighthouse went out, and a ship was in danger.",
            "The roof of {f}'s house flew away.",
        ],
        ["{n} had an idea.", "{n} thought for a while, and then {he} had a plan.", '"I can help," said {n}.'],
        [
            "{He} called all the neighbors, and they worked through the night.",
            "{He} lit a big fire on the hill, so that all could see the way.",
            "{He} tied a strong rope to a tree and helped everyone, one by one.",
        ],
        ["In the morning the storm was over, and everyone was safe.", "When the sun came up, nobody was hurt."],
        ['"Thank you, {n}," said {f}.', "They made a big breakfast and thanked {n}."],
    ],
    [  # the magic thing
        [
            "One day an old woman gave {him} {a_t}.",
            "In the attic {n} found {a_t}.",
            "At the market {n} bought {a_t} for one penny.",
        ],
        ["It was magic and could grant one wish.", '"It will grant you a single wish," said a tiny voice.'],
        ["{n} thought of gold, of a castle and of a ship.", "{He} thought about it for three days."],
        ["Then {he} saw {f}, who was sick and could not play.", "Then {he} saw that the well of the village was dry."],
        [
            '"I wish that everything will be well again," said {n}.',
            "So {he} wished for help for the others, not for {him}self.",
        ],
        ["At once it was done, and the {t} turned to dust.", "There was a flash of light, and the wish came true."],
    ],
    [  # a journey
        [
            "{n} wanted to see the sea.",
            "{n} wanted to know what was behind the mountains.",
            "{n} wanted to see the whole world.",
        ],
        [
            "So one day {he} packed some bread and cheese and set out.",
            "So {he} took {a_t} and a bag of nuts and left home.",
        ],
        [
            "On the way {he} met {f}, and they traveled together.",
            "On the first day {he} met {f}, who was also on a journey.",
        ],
        [
            "They crossed forests, rivers and fields of flowers.",
            "They slept under the stars and told each other stories.",
        ],
        [
            "After ten days they came to a high cliff and saw the wide blue sea.",
            "After many days they stood on top of the world and saw everything.",
        ],
        ["It was wonderful, but soon {n} thought of home.", '"It is beautiful," said {n}, "but I miss my own bed."'],
    ],
    [  # music
        ["{n} loved to sing, but nobody wanted to listen.", "{n} had an old violin with only three strings."],
        ["So {he} played alone in the woods every evening.", "So {he} went to the hill and sang to the moon."],
        ["One night {f} heard the music and stopped.", "A {c2} and an owl came closer to listen."],
        ['"That is the most beautiful song I know," said {f}.', "Soon all the animals sat in a circle around {him}."],
        ["The next day {f} brought everyone to hear it.", "The news of the music traveled over the hills."],
        ["Since then there is a concert every summer.", "And {n} was never alone again."],
    ],
    [  # sharing in winter
        [
            "The winter was long, and there was little food.",
            "One winter the snow was so deep that nobody could go out.",
        ],
        ["{n} had only one loaf of bread left.", "{n} had a small bag of nuts and nothing more."],
        [
            "There was a knock at the door, and there stood {f}, cold and hungry.",
            "In the evening {f} came and asked for something to eat.",
        ],
        ["{n} gave {fhim} half of all {he} had.", '"Come in," said {n}. "There is enough for two."'],
        [
            "In spring {f} came back with a cart full of food.",
            "When the snow melted, {f} brought {him} {a_t} as a gift.",
        ],
    ],
    [  # a puzzle
        [
            "One day the great clock of the town stopped.",
            "One day the town bell was gone.",
            "One morning all the colors were gone from the garden.",
        ],
        ["Nobody knew what to do.", "Everyone was worried."],
        ["{n} looked very carefully and found a small clue.", "{n} asked many questions and wrote down the answers."],
        ["It led {him} to the old tower, where {f} was sitting.", "{He} followed the clue through the woods to {f}."],
        ['"I only wanted someone to visit me," said {f}.', '"I am sorry," said {f}. "I only wanted to repair it."'],
        ["{n} laughed, and together they put everything right.", "Together they brought it back, and all was well."],
    ],
]


TREASURE_PLOTS = (0, 6)  # the plots that turn on the treasure
THEMES = [
    ("a lost friend", 1),
    ("friendship", 1),
    ("a tree", 2),
    ("a garden", 2),
    ("patience", 2),
    ("courage", 3),
    ("fear", 3),
    ("a race", 4),
    ("a contest", 4),
    ("a storm", 5),
    ("helping others", 5),
    ("a wish", 6),
    ("magic", 6),
    ("a journey", 7),
    ("the sea", 7),
    ("an adventure", 7),
    ("music", 8),
    ("a song", 8),
    ("winter", 9),
    ("kindness", 9),
    ("sharing", 9),
    ("a mystery", 10),
    ("a town", 10),
    ("honesty", 0),
]


def article(word: str) -> str:
    """'a' or 'an' for a word of this corpus."""
    return "an" if word[0].lower() in "aeiou" and not word.startswith(("one", "uni", "use", "eu")) else "a"


class Hero:
    """A character: name, pronouns, and the noun phrase that introduces it ('a brave fox')."""

    def __init__(self, rng: Random, names: list[tuple[str, str]], phrase: str | None = None):
        noun = rng.choice(CREATURES if rng.random() < 0.6 else ROLES) if phrase is None else phrase.split()[-1]
        self.name, she_or_he = rng.choice(names)
        while (noun in FEMALE_ROLES and she_or_he == "he") or (noun in MALE_ROLES and she_or_he == "she"):
            self.name, she_or_he = rng.choice(names)
        adjective = rng.choice(ADJECTIVES)
        self.noun = noun
        self.phrase = phrase or f"{article(adjective)} {adjective} {noun}"
        self.forms = ("she", "her", "her") if she_or_he == "she" else ("he", "his", "him")


def subject(rng: Random) -> str:
    """A hero such as 'a brave fox', or now and then an unlikely one."""
    roll = rng.random()
    if roll < 0.75:
        noun = rng.choice(CREATURES if rng.random() < 0.6 else ROLES)
    elif roll < 0.95:
        noun = rng.choice(ANIMALS)[0] if rng.random() < 0.5 else rng.choice(JOBS)[0]
    else:
        noun = rng.choice(THINGS)
    adjective = rng.choice(ADJECTIVES)
    return f"{article(noun)} {noun}" if rng.random() < 0.4 else f"{article(adjective)} {adjective} {noun}"


def opening(rng: Random, hero: Hero, place: str) -> str:
    n, phrase = hero.name, hero.phrase
    return rng.choice(
        [
            f"Once upon a time there was {phrase} named {n}. {n} lived {place}.",
            f"Once upon a time, {place}, there lived {phrase} named {n}.",
            f"Once upon a time there lived {phrase} named {n} {place}.",
            f"Once upon a time, there was {phrase} named {n}, who lived {place}.",
            f"There once was {phrase} named {n}, who lived {place}.",
            f"Long ago, {place}, there was {phrase} called {n}.",
            f"{place.capitalize()} lived {phrase} named {n}.",
        ]
    )


def theme(rng: Random) -> tuple[str, str]:
    """A story that is about a place, a thing or an idea: (what it is about, the story)."""
    kind = rng.randrange(3)
    if kind == 0:
        place = rng.choice(PLACES)
        about = place.split(" ", 1)[1]
        return about.split(" by ")[0].split(" in ")[0].split(" on ")[0].split(" at ")[0], story(rng, place=place)
    if kind == 1:
        treasure = rng.choice(TREASURES)
        return f"{article(treasure)} {treasure}", story(rng, treasure=treasure)
    about, plot = rng.choice(THEMES)
    return about, story(rng, plot=plot)


def story(
    rng: Random,
    about: str | None = None,
    plots: int = 1,
    once: bool = False,
    place: str | None = None,
    treasure: str | None = None,
    plot: int | None = None,
) -> str:
    """A story of one paragraph per plot.

    `about` is the hero's noun phrase, `once` forces 'Once upon a time', and a given `place`, `treasure` or `plot`
    (an index) is used.
    """
    hero, friend = Hero(rng, HERO_NAMES, about), Hero(rng, FRIEND_NAMES)
    place = place or rng.choice(PLACES)
    first = opening(rng, hero, place)
    while once and not first.startswith("Once upon a time"):
        first = opening(rng, hero, place)
    chosen = rng.sample(PLOTS, plots)
    if treasure or plot is not None:
        chosen[0] = PLOTS[plot if plot is not None else rng.choice(TREASURE_PLOTS)]
    treasure, creature = treasure or rng.choice(TREASURES), rng.choice(CREATURES[:20])
    he, his, him = hero.forms
    slots = {
        "n": hero.name,
        "f": friend.name,
        "he": he,
        "He": he.capitalize(),
        "his": his,
        "him": him,
        "fhe": friend.forms[0],
        "fhim": friend.forms[2],
        "t": treasure,
        "a_t": f"{article(treasure)} {treasure}",
        "c2": creature,
    }
    paragraphs = []
    for i, lines_of in enumerate(chosen):
        lines = [rng.choice(variants) for variants in lines_of]
        if i == plots - 1 and rng.random() < 0.5:
            lines.append(rng.choice(MORALS))
        text = " ".join(lines).format(**slots)
        paragraphs.append(f"{first} {text}" if i == 0 else text)
    return "\n\n".join(paragraphs)
