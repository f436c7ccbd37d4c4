"""What the speculation bench asks: seven sets of five, from answers that are all in the prompt to answers that are nowhere in it."""

GARDEN = """\
The walled garden at Hollin House was laid out in 1794 for a family that never learned to like vegetables. Its south wall is \
hollow: fires were once lit inside it on frosty nights so that the peach blossom would survive until May. The wall has been cold \
since 1916, when the last of the gardeners left for the war, but the peaches are still there, and in a warm year they still ripen. \
Visitors are asked not to pick them, and most visitors do."""

LIGHTHOUSE = """\
Three keepers lived on the rock, and at any time two of them were not speaking to each other. They took turns at the lamp, four \
hours each, and wrote what they saw into one book: the wind, the height of the sea, the ships. For eleven years the book says \
nothing about the keepers themselves. Then, on the second of March, in a hand that nobody has been able to identify, it says: \
"Today we made peace, because the soup was very good." """

RIVER = """\
The river was straightened in the 1930s to make room for maize. It ran faster, cut deeper, and took the fields' soil with it to the \
sea. In 2009 the town bought the meadows back and let the river have its bends. Within three winters the floods downstream were \
lower by a third, the kingfishers had returned, and the farmers who had signed the loudest petition were renting their fields to \
campers for more than maize had ever paid."""

LETTER = """\
Dear Ms Okafor, thank you for your order number 48213 of the ninth of June. We are sorry to tell you that the walnut desk you chose \
will not be ready before the end of July, because the workshop was flooded last week. We can send you the same desk in oak at once, \
at the same price, or keep your order as it is and take fifty pounds off the bill. Please let us know which you would prefer. \
Yours sincerely, Daniel Marsh, Customer Service."""

BREAD = """\
Mix five hundred grams of flour with three hundred and fifty grams of water and leave it for an hour. Add one hundred grams of \
starter and ten grams of salt, and fold the dough every half hour until it has grown by half. Shape it, put it into a floured basket, \
cover it, and leave it in the refrigerator overnight. In the morning heat the oven to two hundred and forty degrees with an iron pot \
inside, turn the loaf into the pot, and bake it for twenty minutes with the lid and for twenty-five without."""

TEXTS = (GARDEN, LIGHTHOUSE, RIVER, LETTER, BREAD)
SWAPS = (("peach", "plum"), ("keepers", "guards"), ("river", "brook"), ("desk", "table"), ("dough", "paste"))

AVERAGE = """\
def average_of_column(rows, column):
    total = 0
    count = 0
    for row in rows:
        value = row.get(column)
        if value is not None:
            total = total + value
            count = count + 1
    if count == 0:
        return None
    return total / count
"""

STACK = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if len(self.items) == 0:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if len(self.items) == 0:
            raise IndexError("peek into an empty stack")
        return self.items[-1]
"""

WORDS = """\
function countWords(text) {
  const counts = {};
  const words = text.toLowerCase().split(" ");
  for (let i = 0; i < words.length; i++) {
    const word = words[i];
    if (counts[word] === undefined) {
      counts[word] = 0;
    }
    counts[word] = counts[word] + 1;
  }
  return counts;
}
"""

CONFIG = """\
server:
  host: 127.0.0.1
  port: 8080
  timeout_seconds: 30
database:
  host: 127.0.0.1
  port: 5432
  name: orders
  pool_size: 8
logging:
  level: info
  file: /var/log/orders.log
"""

QUERY = """\
SELECT customers.name, customers.city, SUM(orders.total) AS spent
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.placed_at >= '2024-01-01'
GROUP BY customers.name, customers.city
ORDER BY spent DESC
LIMIT 10;
"""

PEOPLE = """\
Anna Berg, born 1961, teacher, Oslo
Luis Ortega, born 1975, carpenter, Valencia
Mei Tanaka, born 1988, pilot, Osaka
Tom Whitfield, born 1990, nurse, Leeds
Sara Haddad, born 1969, chemist, Amman"""

INVENTORY = """\
SKU 1001: garden hose, 20 m, 14 in stock, 18.90
SKU 1002: watering can, 9 l, 31 in stock, 12.50
SKU 1003: hand trowel, steel, 50 in stock, 7.25
SKU 1004: wheelbarrow, 85 l, 3 in stock, 74.00"""

TRAINS = """\
07:12 Basel to Zurich, platform 5, on time
07:31 Basel to Bern, platform 11, 4 minutes late
07:44 Basel to Milan, platform 8, on time
08:03 Basel to Paris, platform 30, cancelled"""

PROMPTS: dict[str, list[str]] = {
    "quote": [f"Repeat the following text word for word, and add nothing.\n\n{text}" for text in TEXTS],
    "rewrite": [
        f"Write the following text again in full, but replace every '{old}' by '{new}' and change nothing else.\n\n{text}"
        for text, (old, new) in zip(TEXTS, SWAPS, strict=True)
    ],
    "code": [
        f"Add a docstring to this function and print the whole function again.\n\n```python\n{AVERAGE}```",
        f"Add a method is_empty to this class and print the whole class again.\n\n```python\n{STACK}```",
        f"Rename the variable counts to frequencies and print the whole function again.\n\n```javascript\n{WORDS}```",
        f"Change the port of the server to 9090 and print the whole file again.\n\n```yaml\n{CONFIG}```",
        f"Change the limit of this query to 25 and print the whole query again.\n\n```sql\n{QUERY}```",
    ],
    "summarise": [f"Summarise the following text in two sentences. Use the words of the text where you can.\n\n{text}" for text in TEXTS],
    "json": [
        f"Turn this list into a JSON array of objects with the keys name, born, job and city.\n\n{PEOPLE}",
        f"Turn this list into a JSON array of objects with the keys sku, article, stock and price.\n\n{INVENTORY}",
        f"Turn this list into a JSON array of objects with the keys time, from, to, platform and state.\n\n{TRAINS}",
        f"Turn this file into JSON.\n\n{CONFIG}",
        "Write a JSON array of objects for Mercury, Venus, Earth, Mars, Jupiter and Saturn with the keys name, moons and rings.",
    ],
    "chat": [
        "Why is the sky blue?",
        "How do I learn to play the piano as an adult?",
        "What should I think of before I adopt a dog?",
        "Explain what an interest rate is to a child of ten.",
        "What are the advantages of travelling by train?",
    ],
    "story": [
        "Tell me a story about a clockmaker who could not be on time.",
        "Write a story about a fox who moves into a city.",
        "Tell a story that begins with a knock at the door of a submarine.",
        "Write a short story about two sisters who find a map in a piano.",
        "Tell me a story about the last lamp of a village.",
    ],
}
"""By set, most of the answer in the prompt first."""
