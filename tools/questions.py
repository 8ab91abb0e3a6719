"""Write questions for a drafter's training texts, some two thousand: code, articles to summarise, everyday matters.

    python tools/questions.py questions.jsonl
    specdec distill --from HEAD --out adapted --prompts questions.jsonl --tokens 300000

Code comes from this Python's standard library, texts from its documentation; articles and everyday questions are put
together from parts below. The same Python gives the same questions. None is one of the package's prompts."""
import argparse
import ast
import json
import random
import sysconfig
from pathlib import Path
from textwrap import dedent

ABOUT_CODE = (
    "Explain in a few sentences what this function does.", "Add type hints to this function and show all of it.",
    "Write a docstring for this function and show it with the docstring.", "Write two tests for this function.",
    "Rename the variables so that the code is easier to read, and show the new function.",
    "What happens if this function is called with an empty argument?", "Rewrite this function so that it is shorter.",
    "Translate this function to JavaScript.", "Add error handling to this function and show all of it.",
    "How does the time that this function takes grow with its input?",
    "Change this function so that it logs what it does, and show all of it.")
TO_WRITE = ("Write a Python function `{name}({args})`: {what}.",
            "Write `{name}({args})` in Python, and show how to use it: {what}.",
            "How would you write a function `{name}({args})` in Python? It should do this: {what}.")
THINGS = (
    "a stack|a queue|a linked list|a binary search tree|a bank account|a shopping cart|a timer|a counter of words|"
    "a matrix|a cache with a fixed size|a parser of dates|a deck of cards|a to-do list|"
    "a graph with breadth-first search|a temperature converter|a text wrapper|a priority queue|"
    "a game of noughts and crosses|a password checker|"
    "a phone book|a reader of CSV files|a prime number sieve|a vector in three dimensions|a polynomial|a logger|"
    "an inventory of a shop|a calendar of events|a vending machine|a bloom filter|a rate limiter").split("|")
OF_THINGS = ("Write a Python class for {}. Show how to use it.", "Write JavaScript code for {}.", "Write {} in Java.",
             "How would you test {} in Python? Give an example.", "Explain how {} works, with a short example.")
TOPICS = (
    "baking bread|growing tomatoes|learning to swim|saving money|sleeping better|a cat that scratches the sofa|"
    "moving to a new city|running a first 5 kilometres|planning a birthday party|cleaning an old bicycle|"
    "choosing a laptop|cooking rice|feeding birds in winter|learning the guitar|writing a letter of complaint|"
    "travelling with small children|keeping houseplants alive|a job interview|a difficult colleague|"
    "reading more books|the history of tea|volcanoes|how bridges stand|why leaves turn red|the moon and the tides|"
    "how vaccines work|what inflation is|how a refrigerator works|the water cycle|why the sky is blue|"
    "how bees find flowers|earthquakes|how glass is made|photosynthesis|why we dream|recycling paper|"
    "how elections are counted|old maps|sailing boats|making cheese|sharpening knives|first aid for burns|"
    "painting a room|repairing a leaking tap|hiking in the mountains|packing a suitcase|stargazing|chess openings|"
    "folding paper planes|a poem about the sea|a short story about a lighthouse|a dialogue of a baker and a postman|"
    "thank-you notes|public speaking|making new friends|being on time|learning a language|keeping a diary|"
    "walking a dog in the rain|coffee without a machine").split("|")
OF_TOPICS = (
    "Give me five tips about {}.", "I am a beginner. What should I know about {}?", "Explain {} to a child of ten.",
    "Write a short paragraph about {}.", "What are common mistakes with {}?", "Tell me something surprising about {}.",
    "My friend asked me about {}. What should I answer?", "Make a plan for a week about {}, day by day.")
PLACES = ("the harbour town of Elsby|a village in the northern hills|the city of Marlow|the island of Tarn|"
          "a school near the coast|the old quarter of Brest|a valley in the Alps|the port of Lindham").split("|")
OPENINGS = (
    "After {n} years of planning, {place} has opened a new {house}.",
    "Visitors to {place} will find the {house} closed from the end of the month, officials said on Tuesday.",
    "For the first time in {n} years, the {house} in {place} is full.",
    "A fire in the {house} of {place} has left {n} families without power.",
    "Volunteers in {place} have repaired the {house} in only {n} weeks.",
    "Scientists have found traces of a {house}, {n} centuries old, below {place}.")
MIDDLES = (
    "The work cost {many} thousand euros, most of which came from donations.",
    "The mayor, {person}, called it a day to remember.",
    "{person}, who has lived there for {n} years, said that she had not expected so many visitors.",
    "About {many} people came on the first day, many of them by bicycle.",
    "Rain and strong wind had delayed the work twice.", "Some shop owners fear that fewer customers will come.",
    "A study by the local college counted {many} birds of {n} species there.",
    "The old one, built in {year}, had been closed because of damp walls.",
    "Children from two schools painted the doors.", "The council voted {n} to {few} for the plan.",
    "Tickets cost {few} euros, and are free for pupils.", "{person} and a friend had the idea over breakfast.")
ENDINGS = (
    "Whether the money will last until spring is not known.", "The next meeting is on the first Monday of {month}.",
    "A second part is planned for {month}.", "No one was hurt.", "The council will decide in {month}.",
    "Visitors are asked to leave their cars at home.")
HOUSES = ("library|swimming pool|ferry terminal|bakery|tram line|museum|clock tower|market hall|railway station|"
          "wind farm|skating rink|botanical garden|cinema|hospital wing|observatory").split("|")
PEOPLE = ("Ana Kovac|Peter Lund|Mira Holm|Jonas Weber|Sara Idowu|Tom Becker|Lena Moreau|Ravi Shah|Ida Nilsen|"
          "Omar Haddad").split("|")
MONTHS = "January|March|April|June|September|October|November".split("|")
OF_ARTICLES = ("Summarise this article in two sentences.", "Summarise this article in one sentence.",
               "What is this article about?", "Give me the three most important facts of this article as a list.",
               "Write a headline for this article, and a short summary.")
OF_TEXTS = ("Summarise this text in two sentences.", "Explain this text in simple words.",
            "Rewrite this text so that it is shorter.")


def functions(draw: random.Random) -> list[tuple[ast.FunctionDef, str]]:
    "Of the standard library, with their source moved to the left, in an order drawn."
    found, root = [], Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"): continue
            found.append((node, dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))))
    draw.shuffle(found)
    return found


def about_code(draw: random.Random) -> list[str]:
    "Functions to talk about, and functions to write by what they are for."
    known = functions(draw)
    short = [code for _, code in known if 120 < len(code) < 520 and 4 <= code.count("\n") <= 16]
    found = [f"Here is a function:\n\n```python\n{code}\n```\n\n{draw.choice(ABOUT_CODE)}" for code in short[:560]]
    for node, _ in known:
        what = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip().rstrip(".")
        if not 30 < len(what) < 200: continue
        args = ", ".join(arg.arg for arg in node.args.args if arg.arg not in ("self", "cls"))
        found.append(draw.choice(TO_WRITE).format(name=node.name, args=args, what=what[0].lower() + what[1:]))
        if len(found) == 890: break
    return found + [form.format(thing) for thing in THINGS for form in OF_THINGS]


def articles(draw: random.Random) -> list[str]:
    "Short news, put together; and paragraphs of Python's documentation."
    from pydoc_data.topics import topics
    found = []
    for i in range(420):
        place = draw.choice(PLACES)
        lines = [OPENINGS[i % len(OPENINGS)], *draw.sample(MIDDLES, draw.randint(4, 6)), draw.choice(ENDINGS)]
        told = " ".join(line.format(
            place=place, house=draw.choice(HOUSES), n=draw.randint(3, 40), many=draw.randint(50, 900),
            few=draw.randint(2, 9), year=draw.randint(1880, 1990), person=draw.choice(PEOPLE),
            month=draw.choice(MONTHS)) for line in lines)
        found.append(f"{draw.choice(OF_ARTICLES)}\n\n{told}")
    pieces = [piece for text in topics.values() for piece in text.split("\n\n") if "::=" not in piece]
    plain = [" ".join(piece.replace("*", "").split()) for piece in pieces]
    texts = [text for text in plain if 250 < len(text) < 800]
    draw.shuffle(texts)
    return found + [f"{draw.choice(OF_TEXTS)}\n\n{text}" for text in texts[:220]]


def questions() -> list[str]:
    "All of them, each once, in an order drawn."
    draw = random.Random(40)
    found = about_code(draw) + articles(draw) + [form.format(topic) for topic in TOPICS for form in OF_TOPICS]
    found = list(dict.fromkeys(found))
    draw.shuffle(found)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    asked = questions()
    parser.parse_args().out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), encoding="utf-8")
    print(f"{len(asked):,} questions")
