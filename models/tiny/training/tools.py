"""The functions that generated conversations call, with the requests that lead to a call."""

import random
import string

from models.tiny.training import vocabulary
from models.tiny.training.render import Tool


def _tool(name: str, description: str, **parameters: str) -> Tool:
    return Tool(name, description, parameters)


TEXT, WHOLE = "string", "integer"
CATALOGUE: tuple[tuple[Tool, tuple[str, ...]], ...] = (
    (
        _tool("get_weather", "Get the current weather of a city", city=TEXT),
        (
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather for {city}.",
        ),
    ),
    (
        _tool("get_time", "Get the local time of a city", city=TEXT),
        ("What time is it in {city}?", "Tell me the local time in {city}."),
    ),
    (
        _tool(
            "convert_currency",
            "Convert money between currencies",
            amount="number",
            source=TEXT,
            target=TEXT,
        ),
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
    ),
    (
        _tool("send_message", "Send a message to a person", to=TEXT, text=TEXT),
        ("Send a message to {to}: {text}", "Tell {to} this: {text}"),
    ),
    (
        _tool("set_alarm", "Set an alarm", hour=WHOLE, minute=WHOLE),
        ("Set an alarm for {hour}:{minute}.", "Wake me up at {hour}:{minute}."),
    ),
    (
        _tool("set_timer", "Start a timer", minutes=WHOLE),
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
    ),
    (
        _tool("play_song", "Play a song", title=TEXT),
        ("Play the song {title}.", "I want to hear {title}."),
    ),
    (
        _tool("translate", "Translate a text", text=TEXT, language=TEXT),
        ("Translate '{text}' into {language}.", "How do you say '{text}' in {language}?"),
    ),
    (
        _tool("add_numbers", "Add two numbers", a=WHOLE, b=WHOLE),
        ("Use the tool to add {a} and {b}.", "Compute {a} plus {b} with a tool."),
    ),
    (
        _tool("multiply", "Multiply two numbers", a=WHOLE, b=WHOLE),
        ("Multiply {a} by {b}.", "What is {a} times {b}?"),
    ),
    (
        _tool("search", "Search the web", query=TEXT),
        ("Search the web for {query}.", "Look up {query} online."),
    ),
    (
        _tool("book_flight", "Book a flight", origin=TEXT, destination=TEXT, day=TEXT),
        (
            "Book a flight from {origin} to {destination} on {day}.",
            "I need a flight on {day} from {origin} to {destination}.",
        ),
    ),
    (
        _tool("create_note", "Save a note", title=TEXT, body=TEXT),
        ("Make a note called {title}: {body}", "Save a note with title {title} and text {body}"),
    ),
    (
        _tool("set_light", "Change a light", room=TEXT, color=TEXT),
        ("Make the light in the {room} {color}.", "Set the {room} light to {color}."),
    ),
    (
        _tool("set_temperature", "Set the temperature of a room", room=TEXT, degrees=WHOLE),
        ("Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees."),
    ),
    (_tool("read_file", "Read a file", path=TEXT), ("Show me the file {path}.", "Read {path}.")),
    (
        _tool("delete_file", "Delete a file", path=TEXT),
        ("Delete the file {path}.", "Remove {path}."),
    ),
    (
        _tool("define", "Look up the meaning of a word", word=TEXT),
        ("Look up the word {word}.", "Use the dictionary for {word}."),
    ),
    (
        _tool("get_stock", "Get the price of a stock", symbol=TEXT),
        ("What is the stock price of {symbol}?", "Get the price of {symbol} shares."),
    ),
    (
        _tool("order_food", "Order food", dish=TEXT, count=WHOLE),
        ("Order {count} portions of {dish}.", "Please order {dish}, {count} times."),
    ),
    (
        _tool("add_event", "Add an event to the calendar", title=TEXT, day=TEXT),
        ("Put {title} on my calendar for {day}.", "Add an event {title} on {day}."),
    ),
    (
        _tool("get_user", "Get a user record", id=WHOLE),
        ("Show user {id}.", "Get the record of user number {id}."),
    ),
    (
        _tool("roll_dice", "Roll dice", count=WHOLE, sides=WHOLE),
        ("Roll {count} dice with {sides} sides.", "Throw {count} dice of {sides} sides."),
    ),
)

CHOICES: dict[str, tuple[str, ...]] = {
    "city": vocabulary.CITIES,
    "origin": vocabulary.CITIES,
    "destination": vocabulary.CITIES,
    "source": vocabulary.CURRENCIES,
    "target": vocabulary.CURRENCIES,
    "language": vocabulary.LANGUAGES,
    "to": vocabulary.NAMES,
    "day": vocabulary.DAYS,
    "room": vocabulary.ROOMS,
    "color": vocabulary.COLORS,
    "word": vocabulary.WORDS,
}


def argument(rng: random.Random, name: str, kind: str) -> str | int:
    """Draw a value for one parameter."""
    if name in CHOICES:
        return rng.choice(CHOICES[name])
    if name == "hour":
        return rng.randint(1, 23)
    if name == "minute":
        return rng.randint(10, 59)
    if name == "path":
        folders = [rng.choice(vocabulary.WORDS) for _ in range(rng.randint(1, 3))]
        return "/" + "/".join(folders) + rng.choice((".txt", ".py", ".md", ".json"))
    if name == "symbol":
        return "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 4)))
    if kind != TEXT:
        return rng.randint(0, 10 ** rng.randint(1, 3) - 1)
    return " ".join(rng.choice(vocabulary.WORDS) for _ in range(rng.randint(1, 4)))
