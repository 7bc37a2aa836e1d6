"""Words and invented names of the generated text, and the choice of names that are reserved for tests."""

# ruff: noqa: E501, SIM905 - wordings and word lists read better as they are

from zlib import crc32

from tools.tiny_model.text.grammar import Rng

TRAIN, TEST = "train", "test"

# Names in tests, examples and documents, which never occur in training. In addition, every name is reserved whose CRC-32 (of its lower
# case) is divisible by HELD_OUT_MODULUS. So `score.py` has as many unseen names as it needs.
TEST_NAMES = frozenset(
    """aistonia velmora kestrava orlenna brindmoor quillon tavareth mirelda norvasta ostrel pelluria zanthe drummelow farrowick
    hesperil jorvanna lundmere marrowby nethering ravensholt silverin thornquist umberfell wexlow yarrowden corvalis belgarde
    tindra oswin elowen marisol dagny leopold winifred ignatius rosalind casimir philippa""".split()
)
HELD_OUT_MODULUS = 10


def held_out(name: str) -> bool:
    """Whether `name` is kept for tests."""
    return any(part in TEST_NAMES or crc32(part.encode()) % HELD_OUT_MODULUS == 0 for part in name.lower().split())


# Everyday first names, with the pronoun.
_HE = """Tom Ben Max Leo Sam Jack Paul Peter Oscar Felix Hugo Noah Luke Adam Omar Ivan Karl Erik Anton Marco Pablo Ravi Kenji Ali Yusuf
Daniel David Simon Martin Henry George Arthur Edgar Victor Albert Frank Walter Theo Jonas Emil Nils Mateo Luca Milan Tariq Samir Finn
Otto Rufus Jasper Silas Bruno Diego Pedro Carlos Viktor Boris Hassan Idris Kofi Kwame Tobias Julian Robin Oliver William Harry Charlie
Jamal Arjun Dmitri Pierre Louis Andre Stefan Mikkel Lars Axel Gustav Harald Cedric Ralph Gilbert Norman Malik Rashid""".split()
_SHE = """Mia Anna Ella Lily Rosa Clara Nora Emma Ida Lina Sara Maya Zoe Eva Julia Laura Hanna Greta Martha Alice Ruth Edith Helen
Irene Olga Vera Nina Tara Leila Amina Fatima Yuki Mei Priya Anya Sofia Elena Maria Carmen Ines Lucia Bianca Flora Iris Daisy Hazel Ivy
Olive Pearl Ruby Stella Luna Freya Astrid Ingrid Sigrid Matilda Agnes Beatrice Charlotte Diana Esther Frida Gloria Hilda Judith Kate
Lena Molly Nadia Petra Rachel Selma Tilda Ursula Wanda Yara Zara Amelia Eliza Jane Grace Lucy Susan Ada Nell Tess Meg""".split()
FIRST_NAMES = {TRAIN: [], TEST: []}
for _pronoun, _names in (("he", _HE), ("she", _SHE)):
    for _name in _names:
        FIRST_NAMES[TEST if held_out(_name) else TRAIN].append((_name, _pronoun))

COLOURS = "red blue green yellow white black brown grey purple orange pink golden silver violet turquoise scarlet".split()
ANIMALS = """fox rabbit owl bear cat dog mouse squirrel hedgehog deer wolf goat sheep horse donkey duck goose hen frog turtle badger otter
beaver crow robin swan eagle lion tiger elephant monkey parrot whale seal dolphin snail bee butterfly pony lamb kitten puppy heron mole
stork sparrow lizard camel penguin falcon moose lynx hamster""".split()
FOODS = """bread soup cheese apple pie|honey cake|pancakes|rice|noodles|stew|porridge|plums|cherries|pears|mushrooms|potatoes|carrots
|beans|fish|chocolate|berries|nuts|jam|butter|salad|dumplings|pumpkin soup|lentils|grapes|melon|corn|onion pie|figs|dates|lemon tart"""
FOODS = ["bread", "soup", "cheese", "apple pie", *(f.strip() for f in FOODS.split("|")[1:])]
JOBS = """baker fisher farmer weaver potter teacher doctor carpenter painter gardener miller shepherd sailor tailor smith cook driver pilot
nurse singer writer librarian watchmaker shoemaker beekeeper hunter postman builder lawyer judge engineer clerk guard dancer musician
chemist plumber barber florist""".split()
OBJECTS = """lantern key ring book map clock bell cup spoon knife coat hat scarf basket drum flute violin kite boat wheel hammer mirror
candle letter coin box chest ladder rope bucket blanket pillow button needle compass whistle umbrella bottle teapot lamp chair pen brush
helmet shovel telescope purse glove boot ticket stamp pearl feather stone shell doll ball puzzle camera radio notebook""".split()
GOODS = """salt wool silk tea coffee sugar timber iron copper coal glass paper cotton spices oil wine wheat leather marble wax tin amber
tobacco rubber cocoa pottery diamonds pepper linen rope""".split()
FLOWERS = "rose tulip lily daisy poppy violet orchid iris marigold sunflower lotus bluebell thistle jasmine lavender peony".split()
INSTRUMENTS = "violin flute drum piano guitar harp trumpet cello banjo accordion clarinet organ lute horn".split()
SPORTS = "chess tennis football swimming running skating rowing archery cycling climbing fencing sailing boxing skiing".split()
CONTAINERS = "box drawer bag chest jar basket cupboard envelope trunk sack crate suitcase pocket tin".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
# Nouns for facts of any sort: "the {attribute} of {name} is {value}".
ATTRIBUTES = """code password symbol motto nickname owner leader guardian secret name number label signal sign mark type class rank title
home origin source target partner rival keeper author editor colour shape size weight price cost height length depth speed score goal
result level code word|second name|old name|new name|first name|real name|main street|main square|best friend|patron|seal|emblem|hymn
|anthem|crest|badge|banner|hero|founder|inventor|designer|builder|chief|director|manager|teacher|coach|captain|pilot|driver|doctor
|neighbour|cousin|uncle|aunt|twin|host|guest|winner|loser|champion|record|date|year|season|festival|holiday|dance|song|drink|dessert
|spice|metal|stone|gem|tree|flower|bird|fish|animal|pet|horse|ship|train|bus|station|port|harbour|gate|tower|bridge|temple|castle
|palace|library|museum|school|market|theatre|garden|lake|island|valley|forest|desert|coast|border|road|region|province|district|county
|village|suburb|currency|coin|stamp|language|alphabet|religion|army|navy|council|court|newspaper|magazine|channel|brand|model|version
|engine|battery|fuel|serial number|room number|locker|shelf|address|phone number|postcode|licence|contract|project|task|deadline"""
ATTRIBUTES = [*ATTRIBUTES.split("code word|", maxsplit=1)[0].split(), *(a.strip() for a in ("code word|" + ATTRIBUTES.split("code word|")[1]).split("|"))]
WORDS = sorted({w for words in (ANIMALS, OBJECTS, GOODS, FLOWERS, INSTRUMENTS, COLOURS, JOBS) for w in words})

_ONSETS = "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sm sn sp st str t th tr v vl w x y z zh".split()
_VOWELS = "a a a e e e i i o o o u u y ai au ea ei ia ie io oa oe oo ou ue aa ee".split()
_CODAS = ["", "", "", "", *"l n r s t m k d th nd rn st ll nn ss x ck sh g p z v rd lm ng nt rk".split()]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENDINGS = {
    "country": "ia ia ia nia land stan ra ania istan or a onia esia mark ova um ica eth".split(),
    "city": "a burg ville ton ford grad haven port mouth field bridge mora dale stad polis by wick ham o i ez en is".split(),
    "person": "a o en in us is ar el an ia eth or ina ric wyn ette ard as ley son sen ova ski well".split(),
    "thing": "o ex um ix on ar el is a ite ide ling er ium os".split(),
}


_RUDE = """fuck shit cunt nig fag rape cock dick puss whor slut nazi hitl sex porn piss bitch wank twat anus anal penis vagi cum tits jew spic chink gook kkk
arse bastar damn jizz poop crap""".split()


def _syllables(rng: Rng, count: int) -> str:
    return "".join(rng.pick(_ONSETS) + rng.pick(_VOWELS) + rng.pick(_CODAS) for _ in range(count))


def _raw_name(rng: Rng, kind: str) -> str:
    style = rng.random()
    if style < 0.40:
        stem = _syllables(rng, rng.pick((1, 1, 1, 2, 2, 3)))
    elif style < 0.70:
        first, second = rng.pick(WORDS), rng.pick(WORDS)
        stem = first[: rng.randint(1, 4)] + second[-rng.randint(2, 4) :]
    elif style < 0.90:
        stem = rng.pick(_LETTERS) + rng.pick("aeiou") + rng.pick(_LETTERS) + rng.pick(("", *"aeiou"))
        stem += "" if rng.chance(0.4) else rng.pick(_LETTERS) + rng.pick("aeiou") + rng.pick(_LETTERS)
    else:
        return "".join(rng.pick(_LETTERS) for _ in range(rng.randint(3, 8)))
    return stem + rng.pick(_ENDINGS[kind]) if len(stem) < 5 or rng.chance(0.6) else stem


def name(rng: Rng, kind: str = "city", split: str = TRAIN) -> str:
    """An invented name of one word; `kind` is country, city, person or thing; `split` says on which side of the hold-out."""
    while True:
        raw = _raw_name(rng, kind)
        if len(raw) < 3 or len(raw) > 13 or raw in WORDS or any(rude in raw.lower() for rude in _RUDE):
            continue
        if (held_out(raw) if split == TEST else not held_out(raw)):
            return raw.capitalize()


# Words that begin a sentence or join two; a name may begin like one of them, as Ingrid, Theo, William do.
_OPENERS = """in on at and as an if it is the then there they this when what who why how where will with we he her his she so but by for from once one two no not now of off or our out over to
up under us was were after all my me you can do go had has said day new old""".split()


def word_name(rng: Rng, split: str = TRAIN) -> str:
    """An invented person's name that begins like an everyday word; in tokens, it begins with the word itself."""
    while True:
        raw = rng.pick(_OPENERS) + (_syllables(rng, 1) if rng.chance(0.4) else "") + rng.pick(_ENDINGS["person"])
        if raw in ("hero", "isis", "here", "these", "wear") or len(raw) < 3 or any(rude in raw for rude in _RUDE) or held_out(raw) != (split == TEST):
            continue
        return raw.capitalize()


def first_name(rng: Rng, split: str = TRAIN) -> tuple[str, str]:
    """A person's first name, everyday or invented, and the pronoun."""
    if rng.chance(0.5):
        return rng.pick(FIRST_NAMES[split])
    return name(rng, "person", split), rng.pick(("he", "she"))


def full_name(rng: Rng, split: str = TRAIN) -> str:
    """A first name, now and then with a surname or a title."""
    first = first_name(rng, split)[0]
    style = rng.random()
    if style < 0.25:
        return f"{first} {name(rng, 'person', split)}"
    if style < 0.35:
        return f"{rng.pick(('King', 'Queen', 'Captain', 'Doctor', 'Lady', 'Lord', 'Professor'))} {first}"
    return first


def code(rng: Rng) -> str:
    """A password, code or serial number."""
    style = rng.random()
    if style < 0.4:
        return "".join(rng.pick("0123456789") for _ in range(rng.randint(3, 6)))
    if style < 0.7:
        return "".join(rng.pick("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(rng.randint(3, 6)))
    if style < 0.85:
        return f"{rng.pick(WORDS)}{rng.randint(2, 99)}"
    return f"{rng.pick('ABCDEFGHJKLMNPQRSTUVWXYZ')}{rng.pick('ABCDEFGHJKLMNPQRSTUVWXYZ')}-{rng.randint(10, 999)}"


def anything(rng: Rng, split: str = TRAIN) -> str:
    """A value of any sort: a name, a word, a number."""
    style = rng.random()
    if style < 0.5:
        return name(rng, rng.pick(("country", "city", "person", "thing")), split)
    if style < 0.7:
        return rng.pick(WORDS)
    if style < 0.85:
        return code(rng)
    return f"{rng.pick(COLOURS)} {rng.pick(OBJECTS)}"


# Everyday words, for facts of any sort and so that a user's own words are known to the tokenizer.
NOUNS = """meeting lesson party concert wedding exam match trip dinner lunch breakfast appointment flight film race lecture interview parade ceremony game
class course holiday journey visit show play order parcel package delivery payment bill invoice account budget salary tax loan gift present prize ticket
passport visa form document file folder page chapter story poem song picture photo video film message email call letter note list plan map idea question
answer problem solution reason cause effect rule law test report paper article review speech word sentence language computer phone screen keyboard printer
server network router wifi website program app code password user robot machine engine motor tool device sensor camera battery cable switch light window
door wall roof floor room kitchen garage office school hospital hotel restaurant shop bank post factory farm garden park street road bridge station airport
harbour river lake sea mountain hill forest island beach desert city town village country state world planet star moon sun sky weather rain snow wind storm
winter summer spring autumn morning evening night day week month year hour minute time birthday family mother father parent child baby son daughter husband
wife friend neighbour guest boss worker student teacher doctor patient customer client player team winner thief police soldier king queen prince princess
dragon wizard knight pirate witch giant ghost monster unicorn body head hand foot eye ear nose mouth heart blood bone hair shirt shoe dress jacket trousers
hat food water milk tea coffee juice beer wine sugar salt oil meat egg fruit vegetable cake sandwich pizza box bag bottle glass plate car bus train bicycle
truck plane ship boat wheel seat driver captain passenger animal bird fish tree flower grass leaf root seed fire smoke ice metal wood paper stone sand gold
money price coin market number letter colour shape size weight height length distance speed temperature level score result total sum half part piece group
pair line circle square point corner side top bottom end start middle front back treasure medicine experiment project software model data table chart""".split()
ADJECTIVES = """new old big small long short tall high low good bad best worst first second third last next main secret hidden public private local national
strong weak heavy light fast slow early late hot cold warm cool dry wet clean dirty full empty open closed free busy rich poor young happy sad quiet loud
bright dark deep wide narrow round square flat sharp soft hard smooth rough sweet sour bitter fresh broken lost missing favourite famous strange simple special
important final official daily weekly annual morning evening winter summer left right upper lower inner outer northern southern eastern western
digital electric wooden royal magic lucky common rare modern ancient spare double single""".split()
CREATURES = "dragon giant wizard knight princess prince pirate robot witch elf dwarf troll mermaid ghost monster unicorn fairy dinosaur".split()
EVENTS = """meeting lesson party concert wedding exam match trip dinner lunch breakfast appointment flight film race lecture interview parade ceremony game class
festival fair show play train delivery call visit tour dance picnic auction election funeral test course""".split()
