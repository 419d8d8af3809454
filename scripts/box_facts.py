"""Tables of facts and word lists for the box corpus.

Everything here is plain data, written for this corpus.  The tables are long on purpose: variety of the text the
model writes comes from them.  Facts are ones commonly accepted; places whose capital is disputed or about to
change are left out.
"""

from random import Random


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.replace("\n", ",").split(",") if word.strip()]


# country | capital | region | a main language
_COUNTRY_ROWS = _rows("""
Afghanistan|Kabul|South Asia|Pashto
Albania|Tirana|Southeastern Europe|Albanian
Algeria|Algiers|North Africa|Arabic
Andorra|Andorra la Vella|Southern Europe|Catalan
Angola|Luanda|Southern Africa|Portuguese
Antigua and Barbuda|Saint John's|the Caribbean|English
Argentina|Buenos Aires|South America|Spanish
Armenia|Yerevan|the South Caucasus|Armenian
Australia|Canberra|Oceania|English
Austria|Vienna|Central Europe|German
Azerbaijan|Baku|the South Caucasus|Azerbaijani
Bahrain|Manama|the Middle East|Arabic
Bangladesh|Dhaka|South Asia|Bengali
Barbados|Bridgetown|the Caribbean|English
Belarus|Minsk|Eastern Europe|Belarusian
Belgium|Brussels|Western Europe|Dutch
Belize|Belmopan|Central America|English
Benin|Porto-Novo|West Africa|French
Bhutan|Thimphu|South Asia|Dzongkha
Bolivia|Sucre|South America|Spanish
Bosnia and Herzegovina|Sarajevo|Southeastern Europe|Bosnian
Botswana|Gaborone|Southern Africa|English
Brazil|Brasilia|South America|Portuguese
Brunei|Bandar Seri Begawan|Southeast Asia|Malay
Bulgaria|Sofia|Southeastern Europe|Bulgarian
Burkina Faso|Ouagadougou|West Africa|Mossi
Burundi|Gitega|East Africa|Kirundi
Cambodia|Phnom Penh|Southeast Asia|Khmer
Cameroon|Yaounde|Central Africa|French
Canada|Ottawa|North America|English
Cape Verde|Praia|West Africa|Portuguese
Chad|N'Djamena|Central Africa|French
Chile|Santiago|South America|Spanish
China|Beijing|East Asia|Chinese
Colombia|Bogota|South America|Spanish
Comoros|Moroni|East Africa|Comorian
Costa Rica|San Jose|Central America|Spanish
Croatia|Zagreb|Southeastern Europe|Croatian
Cuba|Havana|the Caribbean|Spanish
Cyprus|Nicosia|the eastern Mediterranean|Greek
Denmark|Copenhagen|Northern Europe|Danish
Djibouti|Djibouti|East Africa|French
Dominica|Roseau|the Caribbean|English
Ecuador|Quito|South America|Spanish
Egypt|Cairo|North Africa|Arabic
El Salvador|San Salvador|Central America|Spanish
Eritrea|Asmara|East Africa|Tigrinya
Estonia|Tallinn|Northern Europe|Estonian
Eswatini|Mbabane|Southern Africa|Swazi
Ethiopia|Addis Ababa|East Africa|Amharic
Fiji|Suva|Oceania|Fijian
Finland|Helsinki|Northern Europe|Finnish
France|Paris|Western Europe|French
Gabon|Libreville|Central Africa|French
Georgia|Tbilisi|the South Caucasus|Georgian
Germany|Berlin|Central Europe|German
Ghana|Accra|West Africa|English
Greece|Athens|Southern Europe|Greek
Grenada|Saint George's|the Caribbean|English
Guatemala|Guatemala City|Central America|Spanish
Guinea|Conakry|West Africa|French
Guinea-Bissau|Bissau|West Africa|Portuguese
Guyana|Georgetown|South America|English
Haiti|Port-au-Prince|the Caribbean|Haitian Creole
Honduras|Tegucigalpa|Central America|Spanish
Hungary|Budapest|Central Europe|Hungarian
Iceland|Reykjavik|Northern Europe|Icelandic
India|New Delhi|South Asia|Hindi
Indonesia|Jakarta|Southeast Asia|Indonesian
Iran|Tehran|the Middle East|Persian
Iraq|Baghdad|the Middle East|Arabic
Ireland|Dublin|Western Europe|English
Italy|Rome|Southern Europe|Italian
Ivory Coast|Yamoussoukro|West Africa|French
Jamaica|Kingston|the Caribbean|English
Japan|Tokyo|East Asia|Japanese
Jordan|Amman|the Middle East|Arabic
Kazakhstan|Astana|Central Asia|Kazakh
Kenya|Nairobi|East Africa|Swahili
Kiribati|South Tarawa|Oceania|Gilbertese
Kuwait|Kuwait City|the Middle East|Arabic
Kyrgyzstan|Bishkek|Central Asia|Kyrgyz
Laos|Vientiane|Southeast Asia|Lao
Latvia|Riga|Northern Europe|Latvian
Lebanon|Beirut|the Middle East|Arabic
Lesotho|Maseru|Southern Africa|Sesotho
Liberia|Monrovia|West Africa|English
Libya|Tripoli|North Africa|Arabic
Liechtenstein|Vaduz|Central Europe|German
Lithuania|Vilnius|Northern Europe|Lithuanian
Luxembourg|Luxembourg City|Western Europe|Luxembourgish
Madagascar|Antananarivo|East Africa|Malagasy
Malawi|Lilongwe|Southern Africa|Chichewa
Malaysia|Kuala Lumpur|Southeast Asia|Malay
Maldives|Male|South Asia|Dhivehi
Mali|Bamako|West Africa|Bambara
Malta|Valletta|Southern Europe|Maltese
Mauritania|Nouakchott|West Africa|Arabic
Mauritius|Port Louis|East Africa|Mauritian Creole
Mexico|Mexico City|North America|Spanish
Micronesia|Palikir|Oceania|English
Moldova|Chisinau|Eastern Europe|Romanian
Monaco|Monaco|Western Europe|French
Mongolia|Ulaanbaatar|East Asia|Mongolian
Montenegro|Podgorica|Southeastern Europe|Montenegrin
Morocco|Rabat|North Africa|Arabic
Mozambique|Maputo|Southern Africa|Portuguese
Myanmar|Naypyidaw|Southeast Asia|Burmese
Namibia|Windhoek|Southern Africa|English
Nepal|Kathmandu|South Asia|Nepali
New Zealand|Wellington|Oceania|English
Nicaragua|Managua|Central America|Spanish
Niger|Niamey|West Africa|Hausa
Nigeria|Abuja|West Africa|English
North Korea|Pyongyang|East Asia|Korean
North Macedonia|Skopje|Southeastern Europe|Macedonian
Norway|Oslo|Northern Europe|Norwegian
Oman|Muscat|the Middle East|Arabic
Pakistan|Islamabad|South Asia|Urdu
Palau|Ngerulmud|Oceania|Palauan
Panama|Panama City|Central America|Spanish
Papua New Guinea|Port Moresby|Oceania|Tok Pisin
Paraguay|Asuncion|South America|Guarani
Peru|Lima|South America|Spanish
Poland|Warsaw|Central Europe|Polish
Portugal|Lisbon|Southern Europe|Portuguese
Qatar|Doha|the Middle East|Arabic
Romania|Bucharest|Southeastern Europe|Romanian
Russia|Moscow|Eastern Europe|Russian
Rwanda|Kigali|East Africa|Kinyarwanda
Saint Kitts and Nevis|Basseterre|the Caribbean|English
Saint Lucia|Castries|the Caribbean|English
Saint Vincent and the Grenadines|Kingstown|the Caribbean|English
Samoa|Apia|Oceania|Samoan
San Marino|San Marino|Southern Europe|Italian
Saudi Arabia|Riyadh|the Middle East|Arabic
Senegal|Dakar|West Africa|Wolof
Serbia|Belgrade|Southeastern Europe|Serbian
Seychelles|Victoria|East Africa|Seychellois Creole
Sierra Leone|Freetown|West Africa|English
Singapore|Singapore|Southeast Asia|English
Slovakia|Bratislava|Central Europe|Slovak
Slovenia|Ljubljana|Central Europe|Slovene
Solomon Islands|Honiara|Oceania|English
Somalia|Mogadishu|East Africa|Somali
South Africa|Pretoria|Southern Africa|Zulu
South Korea|Seoul|East Asia|Korean
South Sudan|Juba|East Africa|English
Spain|Madrid|Southern Europe|Spanish
Sri Lanka|Sri Jayawardenepura Kotte|South Asia|Sinhala
Sudan|Khartoum|North Africa|Arabic
Suriname|Paramaribo|South America|Dutch
Sweden|Stockholm|Northern Europe|Swedish
Switzerland|Bern|Central Europe|German
Syria|Damascus|the Middle East|Arabic
Tajikistan|Dushanbe|Central Asia|Tajik
Tanzania|Dodoma|East Africa|Swahili
Thailand|Bangkok|Southeast Asia|Thai
Timor-Leste|Dili|Southeast Asia|Tetum
Togo|Lome|West Africa|French
Tonga|Nuku'alofa|Oceania|Tongan
Trinidad and Tobago|Port of Spain|the Caribbean|English
Tunisia|Tunis|North Africa|Arabic
Turkey|Ankara|Western Asia|Turkish
Turkmenistan|Ashgabat|Central Asia|Turkmen
Tuvalu|Funafuti|Oceania|Tuvaluan
Uganda|Kampala|East Africa|English
Ukraine|Kyiv|Eastern Europe|Ukrainian
Uruguay|Montevideo|South America|Spanish
Uzbekistan|Tashkent|Central Asia|Uzbek
Vanuatu|Port Vila|Oceania|Bislama
Venezuela|Caracas|South America|Spanish
Vietnam|Hanoi|Southeast Asia|Vietnamese
Zambia|Lusaka|Southern Africa|English
Zimbabwe|Harare|Southern Africa|Shona
the Bahamas|Nassau|the Caribbean|English
the Central African Republic|Bangui|Central Africa|French
the Czech Republic|Prague|Central Europe|Czech
the Democratic Republic of the Congo|Kinshasa|Central Africa|French
the Dominican Republic|Santo Domingo|the Caribbean|Spanish
the Gambia|Banjul|West Africa|English
the Marshall Islands|Majuro|Oceania|Marshallese
the Netherlands|Amsterdam|Western Europe|Dutch
the Philippines|Manila|Southeast Asia|Filipino
the Republic of the Congo|Brazzaville|Central Africa|French
the United Arab Emirates|Abu Dhabi|the Middle East|Arabic
the United Kingdom|London|Western Europe|English
the United States|Washington, D.C.|North America|English
""")
COUNTRIES: list[tuple[str, str, str, str]] = [tuple(row) for row in _COUNTRY_ROWS]
CAPITAL: dict[str, str] = {country: capital for country, capital, _, _ in COUNTRIES}

# city | country | what it is known for | rounded population of the city, or empty
_CITY_ROWS = _rows("""
Paris|France|the Eiffel Tower, the Louvre and the river Seine|2100000
London|the United Kingdom|Big Ben, the river Thames and its museums|8900000
Tokyo|Japan|its busy streets, its gardens and its fast trains|14000000
Rome|Italy|the Colosseum, the Pantheon and its old fountains|2800000
Berlin|Germany|the Brandenburg Gate, its museums and its parks|3700000
Madrid|Spain|the Prado Museum and its sunny squares|3300000
Lisbon|Portugal|its hills, its yellow trams and the river Tagus|550000
Vienna|Austria|classical music, palaces and coffee houses|2000000
Athens|Greece|the Acropolis and its ancient history|650000
Oslo|Norway|its fjord, its forests and its museums|700000
Stockholm|Sweden|its islands, bridges and old town|980000
Copenhagen|Denmark|its harbor, its bicycles and its design|650000
Helsinki|Finland|its design, its saunas and the Baltic Sea|670000
Dublin|Ireland|its writers, its music and the river Liffey|590000
Amsterdam|the Netherlands|its canals, bicycles and museums|930000
Brussels|Belgium|its grand square, chocolate and waffles|190000
Bern|Switzerland|its old town and the river Aare|130000
Warsaw|Poland|its rebuilt old town and the river Vistula|1800000
Prague|the Czech Republic|its castle, its old bridges and its clock|1300000
Budapest|Hungary|its thermal baths and the river Danube|1700000
Cairo|Egypt|the Nile and the nearby pyramids of Giza|10000000
Nairobi|Kenya|its national park and its green hills|4400000
Beijing|China|the Forbidden City and the nearby Great Wall|22000000
Seoul|South Korea|its palaces, its markets and its technology|9400000
New Delhi|India|the India Gate and its wide avenues|250000
Bangkok|Thailand|its temples, canals and street food|9000000
Canberra|Australia|its planned streets and its national museums|470000
Ottawa|Canada|Parliament Hill and the Rideau Canal|1000000
Washington, D.C.|the United States|the White House, the Capitol and its museums|690000
Mexico City|Mexico|its museums, its markets and its long history|9200000
Lima|Peru|its food, its cliffs and the Pacific Ocean|10000000
Buenos Aires|Argentina|tango, wide avenues and lively cafes|3100000
Santiago|Chile|its view of the Andes mountains|6000000
Havana|Cuba|its old cars, its music and its sea wall|2100000
Reykjavik|Iceland|its warm pools and its northern lights|140000
Wellington|New Zealand|its harbor, its wind and its cable car|210000
New York|the United States|tall buildings, theaters and Central Park|
Chicago|the United States|its architecture and Lake Michigan|
Boston|the United States|its universities and its harbor|
Seattle|the United States|its rain, its coffee and the sea|
Toronto|Canada|the CN Tower and Lake Ontario|
Montreal|Canada|its festivals and its old port|
Sydney|Australia|its opera house, its bridge and its beaches|
Melbourne|Australia|its trams, its cafes and its sports|
Barcelona|Spain|its beaches, its markets and its architecture|
Milan|Italy|fashion, design and its great cathedral|
Venice|Italy|its canals, bridges and boats|
Munich|Germany|its parks, its museums and the nearby Alps|
Hamburg|Germany|its large port and its canals|
Zurich|Switzerland|its lake and its old town|
Geneva|Switzerland|its lake and its tall fountain|
Lyon|France|its food and its two rivers|
Marseille|France|its old port and the Mediterranean Sea|
Porto|Portugal|its bridges, its tiles and the river Douro|
Edinburgh|the United Kingdom|its castle and its festivals|
Manchester|the United Kingdom|its music and its industry|
Krakow|Poland|its market square and its castle|
Istanbul|Turkey|its mosques, its bazaars and the Bosphorus|
Mumbai|India|its port, its trains and its film industry|
Shanghai|China|its skyline and its port|
Osaka|Japan|its castle and its street food|
Kyoto|Japan|its temples, shrines and gardens|
Cape Town|South Africa|Table Mountain and its beaches|
Lagos|Nigeria|its markets, its music and its lagoon|
Rio de Janeiro|Brazil|its beaches, its mountains and its carnival|
Sao Paulo|Brazil|its size, its museums and its food|
Cusco|Peru|its stone walls and its mountains|
Dubai|the United Arab Emirates|its towers and its desert|
""")
CITIES: list[tuple[str, str, str, str]] = [tuple(row) for row in _CITY_ROWS]

FEMALE = _words("""
Maria, Anna, Emma, Olivia, Sofia, Lucy, Clara, Nina, Elena, Julia, Sarah, Laura, Alice, Grace, Hannah, Ida, Freya,
Ingrid, Astrid, Amina, Fatima, Leila, Yasmin, Zara, Aisha, Priya, Anika, Meera, Mei, Lin, Yuki, Hana, Sakura, Carmen,
Isabel, Lucia, Paula, Rosa, Marta, Eva, Kate, Emily, Chloe, Zoe, Ruby, Ella, Mila, Nora, Vera, Irina, Olga, Tara,
Maya, Naomi, Ruth, Esther, Celine, Margot, Amelie, Bianca
""")
MALE = _words("""
Tom, Ben, Sam, Jack, Oliver, Leo, Max, Felix, Oscar, Hugo, Lucas, Noah, Liam, Daniel, David, Peter, Paul, Mark, Adam,
Simon, Erik, Lars, Nils, Anders, Omar, Ali, Hassan, Karim, Yusuf, Ravi, Arjun, Kiran, Wei, Jun, Kenji, Hiro, Carlos,
Diego, Pablo, Miguel, Luis, Mateo, Marco, Luca, Andrei, Ivan, Boris, Viktor, Samuel, Joseph, Kofi, Kwame, Tunde,
George, Henry, Arthur, Walter, Martin, Jonas, Emil
""")
PEOPLE: list[tuple[str, str]] = [(n, "she") for n in FEMALE] + [(n, "he") for n in MALE]

# job | where | what the person does there
_JOB_ROWS = _rows("""
nurse|a hospital|take care of patients
doctor|a clinic|help people get well
teacher|a school|teach children to read and write
baker|a bakery|bake fresh bread every morning
engineer|an office|design bridges and roads
farmer|a farm|grow wheat and vegetables
pilot|an airport|fly planes to many countries
gardener|a park|plant flowers and trees
librarian|a library|help people find good books
carpenter|a workshop|build tables and chairs
chef|a restaurant|cook dinner for many guests
driver|a bus company|drive a bus through the city
painter|a studio|paint pictures of the sea
writer|a quiet room|write stories for children
musician|a theater|play the violin in an orchestra
programmer|an office|write software
scientist|a laboratory|study plants
dentist|a clinic|look after people's teeth
lawyer|an office|help people understand the law
plumber|a small company|repair pipes
electrician|a small company|repair lights and machines
tailor|a shop|sew coats and dresses
photographer|a studio|take pictures of people and places
journalist|a newspaper|write about the news
architect|an office|draw plans for new houses
waiter|a cafe|bring coffee and cake to the guests
cashier|a supermarket|help customers
firefighter|a fire station|put out fires
veterinarian|an animal clinic|take care of sick animals
translator|an office|translate books
mechanic|a garage|repair cars
fisherman|a harbor|catch fish in the bay
student|a university|study history
astronomer|an observatory|study the stars
beekeeper|a farm|look after bees and make honey
postal worker|a post office|bring letters to people
clockmaker|a small shop|repair old clocks
geologist|a museum|study rocks
sailor|a harbor|sail ships across the sea
singer|a theater|sing in a choir
potter|a workshop|make cups and bowls
florist|a flower shop|sell roses and tulips
""")
JOBS: list[tuple[str, str, str]] = [tuple(row) for row in _JOB_ROWS]

HOBBIES = _words("""
reading books, playing chess, riding my bicycle, hiking in the mountains, swimming in the lake, painting, cooking,
playing the piano, playing the guitar, taking photographs, watching birds, growing tomatoes, baking cakes, running,
learning languages, writing poems, singing in a choir, watching old films, building model ships, sailing, skiing,
drawing, dancing, playing football, collecting stamps, solving puzzles, looking at the stars, walking in the forest,
visiting museums, listening to jazz, knitting, fishing, playing tennis, camping, repairing old radios
""")

LETTERS_WORDS = _words("""
apple, river, stone, green, light, table, house, moon, tree, water, blue, red, cat, dog, bird, fish, sun, star, bread,
milk, book, door, glass, cloud, rain, snow, wind, fire, gold, iron, paper, clock, train, ship, road, hill, lake, leaf,
rose, salt, king, queen, horse, mouse, lion, bear, wolf, fox, bee, ant, seven, nine, open, close, fast, slow, warm,
cold, north, south, east, west, left, right, happy, quiet, small, large, round, square, yes, no, up, down
""")

THINGS = _words("""
phone, car, radio, piano, camera, house, jacket, guitar, lamp, garden, newspaper, boat, wallet, bakery, movie, medicine,
company, law, bank, painting, game, sofa, kettle, chair, pencil, window, basket, mirror, kite, wheel, bottle, hat
""")

# countries that most people can place, in alphabetical order, for lists
WELL_KNOWN = [
    row[0]
    for row in COUNTRIES
    if row[0]
    in {
        "Argentina",
        "Australia",
        "Austria",
        "Belgium",
        "Brazil",
        "Canada",
        "China",
        "Cuba",
        "Denmark",
        "Egypt",
        "Finland",
        "France",
        "Germany",
        "Greece",
        "India",
        "Ireland",
        "Italy",
        "Japan",
        "Kenya",
        "Mexico",
        "Norway",
        "Peru",
        "Poland",
        "Portugal",
        "Spain",
        "Sweden",
        "Thailand",
        "Turkey",
    }
]

_START = _words("b, d, f, g, h, j, k, l, m, n, p, r, s, t, v, z, br, dr, fl, gr, kr, pl, sh, st, th, tr")
_MIDDLE = _words("a, e, i, o, u, ai, ea, ia, io, ou")
_END = _words("n, l, r, s, m, th, nd, x, k, t") + [""] * 4


def invented(rng: Random) -> str:
    """A made-up name, for what has to be copied rather than known."""
    parts = [rng.choice(_START) + rng.choice(_MIDDLE) for _ in range(rng.randint(1, 3))]
    return ("".join(parts) + rng.choice(_END)).capitalize()


EMOJI = list("🙂🚀🌍🎉🐱🐶🌟🍎🌈🔥🎵📚") + [
    "❤️",
    "👋🏽",
    "é",
    "ü",
    "ñ",
    "ß",
    "ø",
    "中",
    "文",
    "日",
    "本",
    "你",
    "好",
    "Ω",
    "π",
    "→",
]
