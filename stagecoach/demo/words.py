"""Word lists that the task families draw from. Data only."""

from calendar import day_name, month_name

FIRST_NAMES = tuple(
    "Ada Adam Aisha Alex Alice Amara Amir Ana Anna Anton Arun Ben Bella Bruno Carl Carla Chen "
    "Clara Dana Daniel Dara David Diego Dina Elena Elias Ella Emil Emma Erik Eva Farid Felix "
    "Fiona Finn Freya George Grace Greta Hana Hassan Helen Hugo Ida Igor Ines Ivan Jack Jan Jana "
    "Jonas Julia Kai Karim Kate Kenji Lara Laura Lena Leo Lia Liam Lina Lucas Lucy Maja Mara "
    "Marco Maria Mark Max Maya Mei Mia Milo Mira Nadia Nils Nina Noah Nora Olga Oliver Omar Otto "
    "Paul Petra Pia Priya Rafael Ravi Rita Rosa Ruth Sam Sara Selma Sofia Stefan Tara Theo Tim "
    "Tom Uma Vera Victor Wei Yara Yuki Zara Zoe".split()
)
LAST_NAMES = tuple(
    "Adler Bauer Berg Brandt Brown Castro Chan Cohen Costa Cruz Dahl Diaz Dumont Evans Falk "
    "Fischer Garcia Gomez Green Haas Hansen Hill Ito Jensen Khan Kim Klein Kovac Lang Larsen Lee "
    "Lopez Marin Meyer Moreau Mori Novak Okafor Olsen Park Patel Petrov Quinn Rao Reed Rivera "
    "Rossi Roy Sato Silva Singh Stone Tanaka Torres Vogel Wagner Walker Wang Weber West Wolf Wood "
    "Young Zhou".split()
)
CITIES = tuple(
    "Athens Austin Bergen Berlin Bern Bogota Boston Bremen Cairo Chicago Cork Dakar Dallas Delhi "
    "Denver Dublin Florence Geneva Graz Hamburg Hanoi Helsinki Houston Istanbul Jakarta Kyoto "
    "Lagos Lima Lisbon London Lyon Madrid Malaga Manila Milan Miami Munich Nairobi Naples Oslo "
    "Osaka Paris Porto Prague Quito Riga Rome Salzburg Santiago Seattle Seoul Seville Sofia Split "
    "Sydney Tallinn Tokyo Toronto Turin Utrecht Venice Vienna Warsaw Zagreb Zurich".split()
)
COUNTABLE_ITEMS = tuple(
    "apples balls beads books bottles bricks buttons candles cards chairs coins cookies cups eggs "
    "flowers hats keys lamps lemons marbles melons mugs nails notebooks nuts onions oranges pears "
    "pencils pens photos plates plums potatoes ribbons rocks shells spoons stamps stickers stones "
    "tickets tiles tomatoes towels toys".split()
)
CONTAINERS = tuple("bags baskets boxes bundles cartons crates packs sacks trays jars".split())
JOBS = tuple(
    "architect baker barber biologist carpenter chemist cook dentist designer doctor driver "
    "editor electrician engineer farmer florist gardener geologist guide journalist judge lawyer "
    "librarian mechanic musician nurse painter pharmacist photographer pilot plumber potter "
    "sailor singer surgeon tailor teacher translator weaver writer".split()
)
ADJECTIVES = tuple(
    "amber ancient azure bitter black blue bold brave bright brisk broken bronze calm clever cold "
    "copper coral crimson curly dark dusty eager early empty fancy fast fierce gentle giant "
    "golden grand gray green happy heavy hidden hollow honest icy iron ivory jolly kind late lazy "
    "little lonely loud lucky misty modern narrow noble odd old orange pale patient pink plain "
    "polite proud purple quick quiet rapid rare red rough round royal rusty secret sharp shiny "
    "silent silver simple sleepy slow small smooth solid spare steady still sunny sweet swift "
    "tall tiny violet warm white wide wild wise wooden yellow young".split()
)
NOUNS = tuple(
    "anchor arrow badger barrel beacon bear bell bridge brook candle canyon castle cedar circle "
    "cliff cloud comet compass crane crow desert dolphin dragon drum eagle engine falcon feather "
    "fern field flame forest fountain fox garden gate glacier hammer harbor hawk heron hill horse "
    "island kettle kite ladder lake lantern leaf lion lizard maple meadow mirror moon mountain "
    "needle oak ocean otter owl palace panther pebble pigeon pine planet pony rabbit raven river "
    "robin rocket saddle salmon shadow ship spider spring star stork storm stream summit swan "
    "table thunder tiger tower train tunnel turtle valley village violin wagon walrus whale "
    "willow window wolf zebra".split()
)
GROCERIES = tuple(
    "apples bananas beans beer bread butter carrots cheese cherries chicken chocolate coffee corn "
    "cream cucumbers eggs fish flour garlic grapes ham honey jam juice lemons lentils lettuce "
    "milk mushrooms mustard noodles nuts oats oil olives onions oranges pasta peaches pears peas "
    "pepper pickles plums potatoes rice salad salt sausages soap soup spinach sugar tea tofu "
    "tomatoes vinegar water yogurt".split()
)
COLORS = tuple(
    "black blue brown gold gray green orange pink purple red silver turquoise white yellow".split()
)
ANIMALS = tuple(
    "ant bat bear bee bird bull camel cat cow crab deer dog duck eagle fish fly fox frog goat "
    "goose hamster hen horse lamb lion mole moose mouse mule owl ox parrot pig pony rabbit rat "
    "seal shark sheep snail snake spider swan tiger toad turtle wolf worm".split()
)
LANGUAGES = tuple(
    "Arabic Bengali Czech Danish Dutch English Finnish French German Greek Hindi Italian Japanese "
    "Korean Norwegian Polish Portuguese Russian Spanish Swedish Thai Turkish".split()
)
CURRENCIES = tuple(
    "AUD BRL CAD CHF CZK DKK EUR GBP HUF INR JPY KRW MXN NOK PLN SEK USD ZAR".split()
)
MONTHS = tuple(month_name)[1:]
WEEKDAYS = tuple(day_name)
SMALL_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
