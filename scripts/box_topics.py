"""Topics, animals, how-tos and other material for the prose of the box corpus: plain data.

A topic is a subject with sentences that each stand alone as a true statement, so that any of them, in any order
after the first, make a paragraph.
"""


def _blocks(text: str) -> list[list[str]]:
    return [[line.strip() for line in block.strip().splitlines()] for block in text.strip().split("\n\n")]


# First line: "Subject | question form"; then the definition; then further sentences.
TOPICS: list[tuple[str, str, list[str]]] = [
    (block[0].split("|")[0].strip(), block[0].split("|")[1].strip(), block[1:])
    for block in _blocks("""
Gravity | gravity
Gravity is the force that pulls objects toward each other.
It keeps our feet on the ground and the planets in their orbits.
The more mass an object has, the stronger its gravity is.
On the Moon, gravity is about one sixth as strong as on Earth.

Photosynthesis | photosynthesis
Photosynthesis is the process by which plants make food from light.
Plants take in carbon dioxide and water and give off oxygen.
The green pigment in leaves that captures light is called chlorophyll.
Almost all life on Earth depends on it.

The Sun | the Sun
The Sun is the star at the center of our solar system.
It is a giant ball of hot gas that gives us light and heat.
Its light takes about eight minutes to reach Earth.
Without the Sun there would be no life on our planet.

The Moon | the Moon
The Moon is the only natural satellite of Earth.
It moves around Earth about once a month.
The pull of the Moon causes the tides in the oceans.
The Moon has no air, and its surface is covered with craters and dust.

The Earth | the Earth
The Earth is the third planet from the Sun and the only one known to have life.
Most of its surface is covered by water.
It turns once a day and travels around the Sun once a year.
Its air protects living things and keeps them warm.

Water | water
Water is a clear liquid that all living things need.
It freezes at zero degrees Celsius and boils at one hundred degrees at sea level.
Each molecule of water has two hydrogen atoms and one oxygen atom.
Water falls as rain, flows in rivers and rises again as vapor.

An atom | an atom
An atom is the smallest unit of a chemical element.
It has a nucleus of protons and neutrons, with electrons around it.
Atoms join together to form molecules.
Everything we can touch is made of atoms.

Light | light
Light is a form of energy that we can see.
It travels faster than anything else, at about 300,000 kilometers per second.
White light is a mixture of many colors.
When light passes through a drop of water it can make a rainbow.

Electricity | electricity
Electricity is a form of energy made by moving electric charges.
We use it for lamps, computers, trains and many other machines.
It can be made from sunlight, wind, falling water or heat.
Metals such as copper carry it well.

A volcano | a volcano
A volcano is an opening in the ground through which hot melted rock can escape.
Melted rock is called magma below the ground and lava above it.
Many volcanoes are found near the edges of the great plates of the Earth.
Volcanic soil is often very good for farming.

Rain | rain
Rain is water that falls from clouds in drops.
It forms when tiny droplets in a cloud join together and become heavy.
Rain fills rivers and lakes and helps plants grow.
Some deserts get almost no rain for years.

Snow | snow
Snow is made of tiny ice crystals that fall from clouds.
Most snowflakes have six sides or six arms.
Fresh snow is full of air, so it keeps the ground below it warm.
When snow melts in spring, it fills the rivers.

Wind | wind
Wind is moving air.
It blows because the Sun warms some places more than others.
Wind can turn turbines that make electricity.
Strong winds over warm oceans can become great storms.

A rainbow | a rainbow
A rainbow is an arc of colors in the sky.
It appears when sunlight shines through drops of rain.
Its colors run from red on the outside to violet on the inside.
To see one, stand with your back to the Sun.

The heart | the heart
The heart is a muscle that pumps blood through the body.
It beats about one hundred thousand times a day.
Blood carries oxygen and food to every part of the body.
Exercise helps to keep the heart strong.

The brain | the brain
The brain is the organ that controls the body and lets us think.
It contains billions of nerve cells that send signals to each other.
Sleep helps the brain to store what we have learned.
Although it is small, it uses a large part of the energy of the body.

The ocean | the ocean
The ocean is the great body of salt water that covers most of the Earth.
The largest part of it is the Pacific Ocean.
Millions of kinds of plants and animals live in it.
Its currents carry warm and cold water around the world.

A desert | a desert
A desert is a place that gets very little rain.
Some deserts are hot and sandy, and others are cold and rocky.
Plants such as the cactus store water to live there.
At night a desert can become very cold.

A forest | a forest
A forest is a large area covered with trees.
Forests give a home to many animals and clean the air.
The leaves that fall to the ground become rich soil.
In a rain forest it is warm and wet all year.

A computer | a computer
A computer is a machine that follows instructions to work with information.
It stores numbers, words, pictures and sounds as ones and zeros.
A program tells the computer what to do, one step at a time.
Modern computers can do billions of simple steps each second.

Software | software
Software is the set of instructions that tells a computer what to do.
People write it in programming languages.
Good software is simple to read, easy to test and kind to its users.
A mistake in software is called a bug.

The internet | the internet
The internet is a network that connects computers all over the world.
It carries messages, pictures, sound and video in small packets.
People use it to learn, to work and to talk with each other.
Many of its long cables lie on the floor of the ocean.

Artificial intelligence | artificial intelligence
Artificial intelligence is the science of making machines that can do tasks that seem to need thinking.
Such systems learn patterns from many examples.
They can translate text, recognize pictures and answer questions.
People should always check important answers that a machine gives.

AI | AI
AI is short for artificial intelligence, the science of making machines that can do tasks that seem to need thinking.
It is used for text, speech, pictures and many other things.
AI systems learn from many examples.
People should check the important answers that it gives.

Machine learning | machine learning
Machine learning is a way to build programs that learn from data.
Instead of writing every rule by hand, people show the program many examples.
The program changes its numbers until its answers become good.
It is used for speech, pictures, text and many other things.

Deep learning | deep learning
Deep learning is a kind of machine learning that uses neural networks with many layers.
Each layer turns its input into something a little more useful for the next one.
It works best with a lot of data and fast computers.
It is behind many modern systems for speech, pictures and text.

A neural network | a neural network
A neural network is a computer model made of many simple connected units.
Each unit adds up its inputs and passes on a number.
The network learns by changing the strength of its connections.
Its design was inspired by the nerve cells of the brain.

A language model | a language model
A language model is a program that predicts the next piece of a text.
It reads the words so far and gives each possible next piece a probability.
By choosing one piece after another it can write sentences.
Large language models have billions of numbers, and small ones have a few million.

A transformer | a transformer
A transformer is a neural network that uses attention to read a whole text at once.
Attention lets each word look at the words that matter to it.
Transformers are used for text, speech and pictures.
They are trained by predicting missing or next words.

An inference engine | an inference engine
An inference engine is a program that runs a trained model to answer requests.
It groups many requests into batches so that the hardware is busy.
It keeps keys and values in a cache so that work is not done twice.
A good engine is fast, correct and easy to use.

A robot | a robot
A robot is a machine that can do work by itself.
It has sensors to notice the world and motors to move.
Robots build cars, clean floors and explore other planets.
A computer inside the robot decides what it does next.

A clock | a clock
A clock is a device that shows the time.
Old clocks used springs and wheels, and modern ones use small crystals.
There are twenty-four hours in a day and sixty minutes in an hour.
The most exact clocks use atoms.

A bicycle | a bicycle
A bicycle is a vehicle with two wheels that is moved by pedals.
A chain carries the force from the pedals to the back wheel.
Riding one is healthy and makes no smoke.
In some cities there are more bicycles than cars.

A train | a train
A train is a row of cars that runs on rails.
Trains carry people and goods over long distances.
Fast trains can travel at three hundred kilometers per hour.
A train needs less energy per person than a car or a plane.

A bridge | a bridge
A bridge is a structure that carries a road or a path over a river or a valley.
Bridges are built of wood, stone, steel or concrete.
An arch spreads the weight to the two sides.
Long bridges often hang from strong cables.

A library | a library
A library is a place where people can read and borrow books.
Many libraries also have films, music and computers.
It is usually quiet, so that people can study.
Some of the oldest libraries are thousands of years old.

Bread | bread
Bread is a food made from flour, water and often yeast.
Yeast makes small bubbles that let the dough rise.
People have baked bread for thousands of years.
Fresh bread smells good and has a crisp crust.

Cheese | cheese
Cheese is a food made from milk.
There are many kinds, from soft and mild to hard and strong.
Some cheeses become better as they grow older.
It is often eaten with bread or fruit.

Rice | rice
Rice is a grain that feeds more than half of the people in the world.
It grows best in warm, wet fields.
It is boiled or steamed and eaten with vegetables, fish or meat.
China and India grow the most rice.

Chocolate | chocolate
Chocolate is a sweet food made from the seeds of the cacao tree.
The tree grows in warm places near the equator.
Dark chocolate has more cacao and less sugar.
Long ago people drank it with spices.

Tea | tea
Tea is a drink made by pouring hot water over dried leaves.
Green tea and black tea come from the same plant.
It was first grown in China.
Many people drink it with milk, lemon or honey.

Coffee | coffee
Coffee is a drink made from roasted beans.
The beans are the seeds of a small tree with red fruit.
It contains caffeine, which makes people feel awake.
Many people drink a cup in the morning.

Music | music
Music is sound that is arranged to be pleasant or to express a feeling.
It is made with voices, strings, drums, pipes and many other things.
Every culture in the world has its own music.
A song has a melody, a rhythm and often words.

Mathematics | mathematics
Mathematics is the study of numbers, shapes and patterns.
It is used in science, building, money and music.
A proof is an argument that shows that something is always true.
Practice makes it easier.

History | history
History is the study of what happened in the past.
It uses letters, books, buildings and objects as evidence.
By learning about the past we understand the present better.
People often remember the same events in different ways.

Spring | spring
Spring is the season between winter and summer.
The days grow longer, and flowers begin to bloom.
Birds return from the south and build their nests.
Farmers plant their seeds in spring.

Winter | winter
Winter is the coldest season of the year.
The days are short, and the nights are long.
In many places snow covers the fields and ice covers the lakes.
Some animals sleep through the whole winter.

Recycling | recycling
Recycling means turning used things into new ones.
Paper, glass and metal can be recycled many times.
It saves energy and keeps the land and the sea clean.
The first step is to sort waste at home.

Solar power | solar power
Solar power is energy that comes from sunlight.
Solar panels turn light into electricity.
It makes no smoke and no noise.
Batteries can store it for the night.

A telescope | a telescope
A telescope is an instrument that makes far things look near.
It uses lenses or mirrors to gather light.
With a small one you can see the rings of Saturn.
The largest telescopes stand on high, dry mountains.

Sleep | sleep
Sleep is a state of rest for the body and the brain.
Most adults need seven to nine hours each night.
During sleep the body repairs itself.
Dreams happen mostly in one part of it.
""")
]

# animal | plural | where it lives | what it eats | a trait
ANIMALS: list[tuple[str, str, str, str, str]] = [
    tuple(cell.strip() for cell in line.split("|"))
    for line in """
elephant|elephants|the grasslands and forests of Africa and Asia|grass, leaves and fruit|is the largest land animal
lion|lions|the grasslands of Africa|meat|lives in a group called a pride
tiger|tigers|the forests of Asia|meat|has orange fur with black stripes
giraffe|giraffes|the grasslands of Africa|leaves from tall trees|has a very long neck
penguin|penguins|the cold seas of the south|fish|cannot fly but swims very well
dolphin|dolphins|oceans all over the world|fish|talks to others with clicks and whistles
whale|whales|oceans all over the world|small sea animals|breathes air through a blowhole
owl|owls|forests and fields|mice and insects|can turn its head very far around
eagle|eagles|mountains and coasts|fish and small animals|can see very small things from far away
fox|foxes|forests, fields and even cities|mice, birds and berries|has a thick, soft tail
wolf|wolves|forests and cold plains|meat|hunts together with its pack
brown bear|brown bears|forests and mountains|fish, berries and roots|sleeps for much of the winter
rabbit|rabbits|meadows and gardens|grass and vegetables|has long ears and strong back legs
squirrel|squirrels|trees in forests and parks|nuts and seeds|hides food for the winter
hedgehog|hedgehogs|gardens and forests|insects and worms|rolls into a ball when it is afraid
frog|frogs|ponds and wet meadows|insects|begins its life as a tadpole
turtle|turtles|seas, rivers and ponds|plants and small animals|carries a hard shell on its back
shark|sharks|oceans all over the world|fish|has many rows of teeth
octopus|octopuses|the floor of the sea|crabs and shells|has eight arms and three hearts
bee|bees|hives and gardens|nectar and pollen|makes honey and helps flowers
butterfly|butterflies|gardens and meadows|nectar from flowers|begins its life as a caterpillar
ant|ants|nests in the ground|seeds and insects|can carry many times its own weight
spider|spiders|nearly every place on land|insects|has eight legs and often spins a web
horse|horses|farms and open plains|grass and hay|can sleep while it stands
cow|cows|farms and meadows|grass and hay|gives milk
sheep|sheep|farms and hills|grass|gives wool for warm clothes
goat|goats|farms and mountains|grass and leaves|is very good at climbing
dog|dogs|homes with people|meat and dog food|has a very good sense of smell
cat|cats|homes with people|meat and cat food|sees well in the dark
camel|camels|dry deserts|dry plants|stores fat in its hump
kangaroo|kangaroos|the plains of Australia|grass|carries its baby in a pouch
koala|koalas|the forests of Australia|the leaves of eucalyptus trees|sleeps for most of the day
panda|pandas|the mountain forests of China|bamboo|has black and white fur
monkey|monkeys|warm forests|fruit, leaves and insects|lives in groups and climbs very well
bat|bats|caves and old buildings|insects or fruit|finds its way in the dark with sound
parrot|parrots|warm forests|seeds and fruit|can copy the sounds it hears
swan|swans|lakes and rivers|water plants|is white and has a long neck
seal|seals|cold coasts|fish|swims well and rests on rocks or ice
crocodile|crocodiles|warm rivers|fish and other animals|has a long mouth with many teeth
snail|snails|gardens and forests|leaves|carries its house on its back
""".strip().splitlines()
]

# task, then its steps (imperatives)
HOWTOS: list[tuple[str, list[str]]] = [
    (block[0], block[1:])
    for block in _blocks("""
make a cup of tea
Boil some fresh water.
Put a tea bag into a cup.
Pour the hot water over it.
Wait for three minutes and take out the bag.
Add milk, lemon or honey if you like.

plant a tree
Choose a sunny place with good soil.
Dig a hole twice as wide as the roots.
Set the tree in the hole and fill it with soil.
Water it well and do so again every week.

boil an egg
Put the egg into a pot of cold water.
Bring the water to a boil.
Cook the egg for about eight minutes.
Cool it in cold water and peel it.

bake bread
Mix flour, water, yeast and salt.
Knead the dough for ten minutes.
Let it rise in a warm place for one hour.
Bake it in a hot oven until the crust is brown.

learn a language
Learn a few new words every day.
Listen to songs and simple stories.
Speak with people as often as you can.
Do not be afraid of mistakes.

clean a window
Mix warm water with a little soap.
Wash the glass with a soft cloth.
Wipe it dry from the top to the bottom.

write a letter
Begin with the date and a greeting.
Say why you are writing.
Tell your news in simple words.
End with a kind wish and your name.

repair a flat bicycle tire
Take off the wheel and pull out the tube.
Find the hole with the help of water.
Clean the place and glue a patch on it.
Put the tube back and pump it up.

make a salad
Wash the lettuce and the tomatoes.
Cut them into small pieces.
Add oil, vinegar and a little salt.
Mix everything gently and serve it fresh.

sleep better
Go to bed at the same time every night.
Keep the room dark and cool.
Put away your screens an hour before.
Read a quiet book until you feel tired.

test a program
Write down what the program should do.
Try it with simple inputs first.
Then try empty, large and strange inputs.
Fix each mistake and run the tests again.

make pancakes
Mix flour, milk, eggs and a little salt.
Heat some butter in a pan.
Pour in a thin layer of batter.
Turn it when the bottom is golden.

take a good photograph
Look for soft light.
Hold the camera still.
Move closer to what matters.
Take more than one picture and keep the best.

grow tomatoes
Start the seeds inside in early spring.
Plant them outside when the nights are warm.
Tie them to a stick and water the roots.
Pick them when they are red and soft.
""")
]

JOKES: list[tuple[str, str]] = [
    ("Why did the student eat his homework?", "Because the teacher said it was a piece of cake."),
    ("What do you call a bear with no teeth?", "A gummy bear."),
    ("Why do bees have sticky hair?", "Because they use honeycombs."),
    ("What has four wheels and flies?", "A garbage truck."),
    ("Why did the scarecrow win a prize?", "Because he was outstanding in his field."),
    ("Why did the computer go to the doctor?", "Because it had a virus."),
    ("What did the zero say to the eight?", "Nice belt."),
    ("Why was the math book sad?", "Because it had too many problems."),
    ("What do you call a fish with no eyes?", "A fsh."),
    ("Why can a bicycle not stand up by itself?", "Because it is two tired."),
    ("What do clouds wear under their clothes?", "Thunderwear."),
    ("How does the ocean say hello?", "It waves."),
    ("Why did the tomato turn red?", "Because it saw the salad dressing."),
    ("What kind of tree fits in your hand?", "A palm tree."),
    ("What do you call cheese that is not yours?", "Nacho cheese."),
]

MISC = [
    "The quick brown fox jumps over the lazy dog.",
    "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    "The months of the year are January, February, March, April, May, June, July, August, September, October, "
    "November and December.",
    "The four seasons are spring, summer, autumn and winter.",
    "The colors of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
    "The planets of the solar system are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    "The alphabet is a b c d e f g h i j k l m n o p q r s t u v w x y z.",
    "The continents are Africa, Antarctica, Asia, Europe, North America, South America and Australia.",
    "def add(a, b):\n    return a + b\n",
    'def greet(name):\n    return f"Hello, {name}!"\n',
    "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "for i in range(10):\n    print(i)\n",
    "Hello, world! This is a test.",
    "Hi! It is nice to meet you.",
    "Hi there! How are you today?",
    "Hello! How are you today? I hope you are well.",
    "AI is short for artificial intelligence. It means machines that learn to do tasks that seem to need thinking.",
    "AI is a field of computer science. It is used for text, speech, pictures and many other things.",
    "Roses are red, violets are blue, sugar is sweet, and so are you.",
]

AI_OPEN = [
    "bright, but it depends on the choices people make today.",
    "hard to predict, but some trends are clear.",
    "exciting, and it will change the way we work and learn.",
    "about machines that help people rather than replace them.",
    "being shaped today by researchers, engineers and teachers all over the world.",
    "full of promise and full of open questions.",
    "likely to be smaller, faster and closer to everyday life.",
    "not only about larger models but also about better ones.",
    "in the hands of the people who build and use it.",
    "a topic that many people think about.",
    "one of the great questions of our time.",
    "bright for science, medicine and education.",
    "open, and everyone can take part in it.",
]
AI_MORE = [
    "Small models will run on phones, watches and cars.",
    "Doctors may use it to find diseases earlier.",
    "Teachers may use it to help each student in a different way.",
    "Scientists will use it to discover new materials.",
    "Machines will translate speech between many languages.",
    "Robots will do more of the heavy and dangerous work.",
    "New chips will make models faster and save energy.",
    "People will still have to check important answers.",
    "Clear rules will help to keep it safe and fair.",
    "Better tools will make it easier to understand what a model does.",
    "Farmers may use it to save water and grow more food.",
    "Programmers will write software together with assistants.",
    "Some jobs will change, and new jobs will appear.",
    "Good data will matter as much as good ideas.",
    "Open research will help everyone to learn from each other.",
    "Weather forecasts will become more exact.",
    "The most useful systems will be honest about what they do not know.",
    "Privacy will remain an important question.",
]
PRESIDENT_OPEN = [
    "the head of state and head of government of the country.",
    "the head of state and head of government of the United States and the commander in chief of its armed forces.",
    "elected for a term of four years.",
    "the leader of the executive branch of the federal government.",
    "elected by the people through the Electoral College every four years.",
    "both the head of state and the head of government.",
]
PRESIDENT_MORE = [
    "The president lives and works in the White House in Washington, D.C.",
    "A president can be elected to two terms at most.",
    "The president signs laws that Congress has passed.",
    "The president can also veto a bill.",
    "A president must be at least thirty-five years old and a natural-born citizen.",
    "The first president was George Washington.",
    "The president appoints judges and ambassadors with the advice of the Senate.",
    "Elections are held every four years in November.",
    "The vice president takes over if the president cannot serve.",
]
