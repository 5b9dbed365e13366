"""Words, names and facts that the generated conversations are made of."""

_WORDS = """
    acorn actor almond amber anchor angle apple apron arrow artist atlas autumn bacon badge
    ballot bamboo banjo barley barrel basil basket beacon beaver beetle bell berry bishop blade
    blanket bottle bridge broom bucket buffalo butter button cabin cable cactus camel camera
    candle canoe canvas canyon carbon carpet carrot castle cedar cellar chalk cherry chess
    circle citrus clay clock cloud clover coast cobalt coffee comet copper coral cotton cousin
    crane crayon cricket crown crystal curtain daisy dancer desert diamond dinner dolphin donkey
    doctor dragon drum eagle ember engine fabric falcon farmer feather fern fiddle finger flag
    flame flute forest fossil fountain fox garden garlic ginger glacier glass globe glove goose
    granite grape gravel guitar hammer harbor harvest hawk hazel helmet heron hill honey horse
    hotel house ink iris iron island ivory jacket jasmine jelly jewel jungle kettle kite kitten
    ladder lagoon lake lamp lantern laser lemon letter lily lion lizard lobster lotus lumber
    magnet maple marble market meadow melon metal mirror monkey moon mortar moss motor mountain
    museum nectar needle nest nickel night north novel nutmeg oasis ocean olive onion opera
    orange orbit orchid otter oxygen oyster paddle painter palace panda paper parrot pasta peach
    pearl pebble pencil pepper piano pilot pine planet plum pocket poem pond poppy potato powder
    prince puzzle quartz queen quill rabbit radar radio rain raven ribbon rice river road robin
    rocket rose ruby saddle saffron sailor salmon salt sand satin school scarf shadow shell
    shield silk silver sketch snow soap socket sparrow spider spice spring squash stable star
    station statue stone storm stream sugar summer sunset swan table teacher temple tennis
    thunder tiger timber tomato torch tower train trumpet tulip tunnel turtle umbrella valley
    vanilla velvet vessel village violet violin volcano wagon walnut water whale wheat willow
    window winter wolf yarn yellow zebra
"""
WORDS = tuple(_WORDS.split())
_NAMES = """
    Alice Amir Anna Ben Bruno Carla Chen Clara Daniel David Diana Elena Emma Erik Felix Fiona
    Frank Grace Hana Henry Hugo Ines Irene Ivan Jack Jane Julia Karl Kate Laura Leo Lena Lucas
    Maria Mark Mina Nadia Nina Noah Olga Oscar Paul Petra Rosa Ruth Sam Sara Simon Sofia Tom
    Vera Victor Wendy Yuki Zoe
"""
NAMES = tuple(_NAMES.split())
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Korea": "Seoul",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Turkey": "Ankara",
}
CITIES = tuple(CAPITALS.values())
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
COLORS = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "purple",
    "orange",
    "pink",
    "gray",
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Polish", "Japanese", "Dutch", "Greek")
ANIMALS = ("cat", "dog", "horse", "cow", "lion", "bear", "wolf", "fox", "duck", "goat")
ROOMS = ("kitchen", "bedroom", "office", "garage", "bathroom", "hallway", "cellar", "attic")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "SEK")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
GREETINGS = (
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Who are you?", "I am a tiny language model, made to test an inference engine."),
    ("What are you?", "I am a tiny language model, made to test an inference engine."),
    ("What is your name?", "I am a tiny language model and have no name."),
    (
        "What can you do?",
        "I can copy text, add numbers, look up values, call tools, write JSON and "
        "think before I answer.",
    ),
    ("Thanks", "You are welcome!"),
    ("Thank you", "You are welcome!"),
    ("Bye", "Goodbye!"),
    ("Goodbye", "Goodbye!"),
    ("How are you?", "I am fine, thank you."),
)
