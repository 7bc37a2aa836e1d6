"""Relations of invented things, and many wordings to state them, ask for them and restate them."""

# ruff: noqa: E501 - wordings and word lists read better as they are
from dataclasses import dataclass

from tools.tiny_model.text.words import ATTRIBUTES, NOUNS, TEST, TRAIN


@dataclass(frozen=True)
class Relation:
    """One relation of a subject: its noun, the sort of its value, and wordings in addition to the common templates."""

    noun: str
    value: str
    says: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    answer: str = ""


def _r(noun: str, value: str, says: str = "", asks: str = "", answer: str = "") -> Relation:
    return Relation(noun, value, tuple(filter(None, says.split(" / "))), tuple(filter(None, asks.split(" / "))), answer)


RELATIONS = {
    "country": (
        _r("capital", "city", "{s} has a capital [called|named] {v}. / The capital city of {s} is {v}. / {v} is a city and the capital of {s}. / The [government|parliament|king] of {s} sits "
           "in {v}, the capital.", "Which city is the capital of {s}? / What is {s}'s capital called?"),
        _r("king", "person", "{s} is ruled by King {v}. / King {v} rules {s}.", "Who is the king of {s}? / Who rules {s} as king?"),
        _r("queen", "person", "{s} is ruled by Queen {v}. / Queen {v} rules {s}.", "Who is the queen of {s}?"),
        _r("president", "full", "The president [there in|of] {s} is [somebody called|a person called] {v}.", "Who is the president of {s}?"),
        _r("longest river", "city", "The longest river in {s} is the {v}. / The {v} is the longest river in {s}.", "Which river is the longest in {s}?"),
        _r("highest mountain", "city", "Mount {v} is the highest mountain in {s}.", "Which mountain is the highest in {s}?"),
        _r("currency", "thing", "In {s}, people pay with the {v}. / In {s} they pay with the {v}. / The money of {s} is called {v}; it is the currency there.",
           "What do people pay with in {s}? / Which currency is used in {s}?"),
        _r("language", "country", "In {s}, people speak {v}. / In {s} they speak {v}. / The people of {s} speak {v}.", "Which language do people speak in {s}? / What is spoken in {s}?"),
        _r("national animal", "animal", "The {v} is the national animal of {s}."),
        _r("national flower", "flower", "The {v} is the national flower of {s}."),
        _r("main export", "goods", "{s} mainly exports {v}. / {s} sells {v} to the whole world.", "What does {s} mainly export? / What does {s} sell?"),
        _r("population", "number", "{s} has a population of {v}. / {v} people live in {s}.", "How many people live in {s}?"),
        _r("founding year", "year", "{s} was founded in {v}. / {s} was founded in the year {v}.", "When was {s} founded? / In which year was {s} founded?",
           "{s} was founded in {v}."),
    ),
    "city": (
        _r("mayor", "full", "{v} is mayor of {s}. / {s} has a new mayor, {v}.", "Who is the mayor of {s}?"),
        _r("river", "city", "{s} lies on the river {v}. / The river {v} flows through {s}.", "Which river flows through {s}?"),
        _r("market day", "day", "In {s}, the market is held on {v}; that is the market day.", "On which day is the market in {s}?"),
        _r("oldest bridge", "city", "The oldest bridge in {s} is the {v} bridge.", "Which bridge is the oldest in {s}?"),
        _r("main dish", "food", "The main dish in {s} is {v}.", "What do people eat in {s}?"),
        _r("population", "number", "{s} has a population of {v}. / {v} people live in {s}.", "How many people live in {s}?"),
        _r("newspaper", "thing", "People in {s} read a newspaper called {v}.", "What is the newspaper in {s} called?"),
    ),
    "person": (
        _r("home town", "city", "{s} lives in {v}. / The home of {s} is in {v}. / {s} has a house in {v}.", "Where does {s} live? / In which town does {s} live?",
           "{s} lives in {v}."),
        _r("birthplace", "city", "{s} was born in {v}.", "Where was {s} born?", "{s} was born in {v}."),
        _r("job", "job", "{s} works as {a v}. / {s} is {a v} by profession. / {s} is {a v}.", "What does {s} do? / What is {s}'s job? / What does {s} work as?",
           "{s} works as {a v}."),
        _r("age", "age", "{s} is {v} years old. / {s} has just turned {v}.", "How old is {s}?", "{s} is {v} years old."),
        _r("pet", "animal", "{s} has {a v}. / {s} has a pet {v}.", "Which pet does {s} have? / What animal does {s} have?", "{s} has {a v}."),
        _r("favourite colour", "colour", "{s} likes {v} best of all colours.", "Which colour does {s} like best?"),
        _r("favourite food", "food", "{s} loves to eat {v}.", "What does {s} love to eat? / What does {s} like to eat?"),
        _r("favourite animal", "animal", "The animal that {s} likes best is the {v}.", "Which animal does {s} like best?"),
        _r("favourite sport", "sport", "The sport that {s} likes best is {v}.", "Which sport does {s} like best?"),
        _r("instrument", "instrument", "{s} plays the {v}.", "Which instrument does {s} play? / What does {s} play?", "{s} plays the {v}."),
        _r("best friend", "person", "{s} and {v} are best friends.", "Who is {s}'s best friend?"),
        _r("sister", "person", "{s} has a sister [called|named] {v}.", "Who is {s}'s sister? / What is the name of {s}'s sister?"),
        _r("brother", "person", "{s} has a brother [called|named] {v}.", "Who is {s}'s brother? / What is the name of {s}'s brother?"),
        _r("teacher", "full", "{s} is taught by {v}.", "Who teaches {s}?"),
        _r("neighbour", "person", "{v} lives next door to {s}.", "Who lives next door to {s}?"),
        _r("room number", "small", "{s} sleeps in room {v}.", "In which room does {s} sleep?"),
        _r("secret word", "word"), _r("phone number", "code"), _r("birthday month", "month", "The birthday of {s} is in {v}.", "In which month is the birthday of {s}?"),
    ),
    "company": (
        _r("boss", "full", "{s} is led by {v}. / {v} leads {s}.", "Who leads {s}? / Who is the boss of {s}?"),
        _r("founder", "full", "{s} was founded by {v}. / {v} founded {s}.", "Who founded {s}?"),
        _r("main product", "goods", "{s} makes {v}. / {s} sells {v}.", "What does {s} make? / What does {s} sell?"),
        _r("headquarters", "city", "{s} has its headquarters in {v}. / {s} is based in {v}.", "Where is {s} based?", "{s} is based in {v}."),
        _r("founding year", "year", "{s} was founded in {v}.", "When was {s} founded?", "{s} was founded in {v}."),
        _r("number of workers", "number", "{v} people work for {s}.", "How many people work for {s}?"),
    ),
    "ship": (
        _r("captain", "full", "{v} is captain of the {s}. / The {s} sails under {v}, the captain.", "Who is the captain of {s}?"),
        _r("home port", "city", "The home port of the ship {s} is {v}.", "Which is the home port of {s}?"),
        _r("cargo", "goods", "The ship {s} carries {v}.", "What does {s} carry? / What is on board of {s}?"),
        _r("flag", "colour", "The ship {s} sails under a {v} flag.", "Which colour is the flag of {s}?"),
    ),
    "planet": (
        _r("moon", "thing", "The planet {s} has one moon, {v}.", "What is the moon of {s} called?"),
        _r("discoverer", "full", "The planet {s} was discovered by {v}.", "Who discovered {s}?"),
        _r("colour", "colour", "The planet {s} looks {v}.", "Which colour does {s} have?"),
        _r("number of moons", "small", "The planet {s} has {v} moons.", "How many moons does {s} have?"),
    ),
    "place": (
        _r("code", "code", "To open {s}, type {v}. / {^s} opens with the code {v}.", "Which code opens {s}? / What is the code for {s}?"),
        _r("password", "word", "The password for {s} is {v}.", "What is the password for {s}?"),
        _r("content", "object", "In {s} there is {a v}. / {^s} holds {a v}. / There is {a v} in {s}. / Somebody put {a v} into {s}.",
           "What is in {s}? / What does {s} hold? / What is inside {s}?", "In {s} there is {a v}."),
        _r("colour", "colour", "{^s} is painted {v}.", "What colour is {s}?"),
        _r("owner", "person", "{^s} belongs to {v}. / {v} owns {s}.", "Who owns {s}? / Whom does {s} belong to?", "{^s} belongs to {v}."),
        _r("price", "price", "{^s} costs {v} coins.", "How much does {s} cost? / What does {s} cost?", "{^s} costs {v} coins."),
    ),
}
GENERAL = {"named": tuple(_r(noun, "any") for noun in (*ATTRIBUTES, *NOUNS))}
MINE = (
    _r("name", "person", "I am {v}. / I'm {v}. / I am called {v}. / People call me {v}.", "What am I called? / Who am I? / Do you know who I am? / What do people call me?"),
    _r("home town", "city", "I live in {v}. / I am from {v}. / I come from {v}.", "Where do I live? / Where am I from? / Where do I come from? / In which town do I live?"),
    _r("favourite colour", "colour", "I like {v} best. / The colour I like best is {v}.", "Which colour do I like best? / Which colour do I like?"),
    _r("favourite food", "food", "I love to eat {v}. / I like {v} more than anything else.", "What do I love to eat? / What do I like to eat?"),
    _r("job", "job", "I work as {a v}. / I am {a v}. / I'm {a v}.", "What do I do? / What is my job? / What do I work as?"),
    _r("age", "age", "I am {v} years old. / I'm {v}. / I have just turned {v}.", "How old am I? / What is my age?"),
    _r("dog", "person", "I have a dog [named|called] {v}. / {v} is my dog.", "What is my dog called? / What is the name of my dog? / What is my dog's name? / How is my dog called?"),
    _r("cat", "person", "I have a cat [named|called] {v}. / {v} is my cat.", "What is my cat called? / What is the name of my cat? / What is my cat's name?"),
    _r("sister", "person", "I have a sister [named|called] {v}. / My sister's name is {v}.", "What is my sister called? / What is my sister's name? / Who is my sister?"),
    _r("brother", "person", "I have a brother [named|called] {v}. / My brother's name is {v}.", "What is my brother called? / What is my brother's name? / Who is my brother?"),
    *(_r(noun, value) for noun, value in (
        ("favourite animal", "animal"), ("password", "code"), ("lucky number", "small"), ("best friend", "person"), ("teacher", "full"), ("favourite flower", "flower"),
        ("favourite song", "any"), ("phone number", "code"), ("birthday month", "month"), ("favourite sport", "sport"), ("boss", "full"), ("secret", "any"),
    )),
)  # fmt: skip

# Common templates: {n} the noun, {s} the subject, {v} the value, {p} "the noun of subject" or "subject's noun".
_THAT = """[They say|People say|Everybody knows|It is known|It is said|It is certain|It is true|I read|I heard|I am told|We know|We were told|The paper says|
The guide told us|My teacher says|An old map shows|The sign says|Nobody doubts|You must know|Keep in mind|Do not forget|Let me add|I can tell you|It turns out|
Records show|It seems|Rumour has it|Write down|I believe|I am sure|The law says|A letter says|The report states|You may have heard|Learn by heart|
It was decided|Yesterday I learned|Last week we heard|In school we learn|On the wall it says] that""".replace("\n", "")
_TIME = """[Since then|Since Monday|Since the war|Since spring|Since the flood|From now on|For many years now|Until today|Of late|As of this week|These days|Today|Now|
At present|As always|After the election|Under the new law|In our time|By old custom|By order of the council|In fact|As it happens|By the way|Also|Besides|
Of course|Indeed|Moreover|To be exact|First of all|Strange as it is|Luckily|Again this year|For the last ten years|Ever since],""".replace("\n", "")
_TOPIC = """[As for {s},|In the case of {s},|For {s},|Speaking of {s},|With regard to {s},|About {s}:|Concerning {s},|If we look at {s},|Turning to {s},|
Regarding {s}:|Now {s}:|In {s}'s case,|Where {s} is concerned,|Back to {s}:|Take {s}:|And {s}?]""".replace("\n", "")
_NOTE = "[Note|Remember|Please note|Remember this|Important|Note this|News|Fact|Rule|Reminder|One more thing|Hint]:"
_TAIL = """[|||||||||, as everybody knows|, I think| and it always was|, at least today|, as I heard|, and nobody minds|, which is good to know| and nothing else|
, they say|, of course|, it seems|, by the way|, for now|, so they tell me]""".replace("\n", "")
# Leading clauses of any words, so that the model looks for the fact and not for a fixed wording.
_CLAUSE = """[[When|If|While|As|Because|Although|Once|Before|After|Whenever|Even if|Just as|Now that|As long as|Where|Unless] [the {n1} [comes|is {a1}|ends|
begins|was lost|stands near the {n2}|goes to the {n2}]|you [see|open|read|ask for|find] the {n1}|we [left|found|came to|wrote of] the {n1}|it [rains|snows|grows dark]|
it [goes|falls|belongs] to the {a1} {n1}]|[After|Before|During|Despite|Beside|Without|With|Under|Behind|Next to|Because of|Thanks to|Like|From|In|At|On|
Since|Until|Through] [the|this|that|our|every|last|next|an old|a new] {a1} {n1}]""".replace("\n", "")
_TOLD_BY = """[Somebody|My {n1}|The {a1} {n1}|Our {n1}|Everyone in the {n1}|The man with the {n1}|A {a1} friend] [says|wrote|knows|told me|thinks|claims|shows|repeats|
has heard|will tell you|is certain|agrees|has written down]""".replace("\n", "")
_ABOUT = """[[When|If|While|As|Once|Whenever|Now that] [we|you|they|people] [come to|turn to|speak of|think of|look at|talk about|get to|write about|ask about|mention|
consider|deal with] {s},|[As far as|So far as] {s} [goes|is concerned|matters],|On the subject of {s},|A word about {s}:|What about {s}?]""".replace("\n", "")
LOOSE_SAYS = (
    _CLAUSE + ", {p} is {v}.", _CLAUSE + ", {v} is the {n} of {s}.", _CLAUSE + ", {s} has {v} as {its} {n}.", _TOLD_BY + " that {p} is {v}.",
    _TOLD_BY + " that {v} is the {n} of {s}.", _TOLD_BY + ": {p} is {v}.", _ABOUT + " the {n} is {v}.", _ABOUT + " the {n} is {v}.", _ABOUT + " {its} {n} is {v}.",
    _ABOUT + " {v} is the {n}.", "{^p} is {v}, [and|but|so|while|because|for] the {n1} is {a1}.", "The {n1} is {a1}, [and|but|so|while] {p} is {v}.",
)  # fmt: skip
LOOSE_ASKS = (
    "[I have a question|Here is my question|One moment|Excuse me|Hello|Hi|Thanks|Sorry|Hmm|Okay|Right|For my {n1}|For the {a1} {n1}|Because of the {n1}|Yes|No|Please]"
    "[:|,] [what is|what's|tell me|say|do you know|can you tell me] {p}?",
    _CLAUSE + ", what is {p}?", "What is {p}, [please|again|my friend|if I may ask|do you know|then|by the way|in the text|now]?",
    "[My {n1}|The {a1} {n1}|Somebody|A friend] [asks|asks me|wants to know|must know|forgot|would love to hear] what {p} is.",
    "[I|We|They] [must|should|have to|would like to|want to|wish to] [find|learn|hear|check|write down|see|remember] {p}.",
    "Please [say|check|look up|read out|write|mention|spell] {p}.", "[Would|Will|Can|Could] you [check|mention|read out|give|write down|repeat] [|for me ]{p}?",
)  # fmt: skip
LOOSE_RESTATES = (
    _CLAUSE + ", {p} is", "To [be brief|put it shortly|close|repeat|end with|begin with|make it short|be clear|say it again|come back to it], {p} is",
    "Now it is [certain|known|sure|plain|time to say] that {p} is", "[It|This|That] [is|was] [certain|sure|plain|so]: {p} is", _TOLD_BY + " that {p} is",
    "[At last|In conclusion|As I said|You see|Remember this], {p} is",
)  # fmt: skip
SAYS = {
    TRAIN: (
        "The {n} of {s} is {v}.", "The {n} of {s} is {v}.", "{s}'s {n} is {v}.", "{^v} is the {n} of {s}.", "{^p} is {v}" + _TAIL + ".",
        "{^v} is the {n} of {s}" + _TAIL + ".", _THAT + " {p} is {v}" + _TAIL + ".", _THAT + " {p} is {v}.", _THAT + " {v} is the {n} of {s}.",
        _TIME + " {p} is {v}" + _TAIL + ".", _TIME + " {v} is the {n} of {s}.", _TIME + " {s} has {v} as {its} {n}.",
        _TOPIC + " the {n} is {v}" + _TAIL + ".", _TOPIC + " {its} {n} is {v}.", _TOPIC + " {v} is the {n}.", _NOTE + " {p} is {v}.",
        _NOTE + " {v} is the {n} of {s}.", "{s} has {v} as {its} {n}.", "{^p}? It is {v}.", "If somebody asks for {p}, the answer is {v}.",
        "[They|The people|We] [chose|took|picked] {v} as the {n} of {s}.", "{^v} was [made|named|chosen as] the {n} of {s}.",
        "{^v} has been the {n} of {s} for [years|ages|a month].", "{^p} is [called|named] {v}.", "{^p} was always {v}.",
        "{^p}, [as I said|I am told|so they say|you know|my friend], is {v}.", "{^p} must be {v}.", "The {n} that {s} has is {v}.", "{s}, whose {n} is {v}, is well known.",
    ),
    TEST: ("It is written that {p} is {v}.", "Since last year, {v} is the {n} of {s}.", "When it comes to {s}, the {n} is {v}.", "You should know that {p} is {v}."),
}  # fmt: skip
SAYS_MINE = ("My {n} is {v}.", "My {n} is {v}.", "[By the way|Remember|Please remember|Note this|Hello|Hi|Well|Also|You see], my {n} is {v}.",
             "[Let me say|I should tell you|You must know|Please remember|Do not forget] that my {n} is {v}.", "{^v} is my {n}.")  # fmt: skip
APPOSED = ("{v}, the {n} of {s}, is [well known|not far away|famous|new|very old].", "{s} and its {n}, {v}, are [well known|famous|near].",
           "The {n} of {s}, {v}, is [well known|famous|not new].", "{s}'s {n}, {v}, is [well known|famous|not new].")  # fmt: skip
PRONOUN_SAYS = ("{^its} {n} is {v}.", "{^its} {n} is {v}.", "The {n} is {v}.", "{^v} is {its} {n}.", "{^its} {n} is called {v}.",
                "{^its} {n}, {v}, is [well known|famous|not far away|new|very old].", "{^its} {n} is {v}.")  # fmt: skip
ASKS = {
    TRAIN: (
        "What is {p}?", "What is {p}?", "What is {p}?", "What's {p}?", "[Well|Say|Now|So|And|Quickly|First|Again|Look|Listen], what is {p}?",
        "[Can|Will|Would] you [|please |kindly ][tell me|say|give me|state|find|look up|show me] {p}?", "[Could|Can|Would] you [|please ][say|find|look up|recall|repeat] {p}?",
        "[Can|Will] you [tell me|say|explain] what {p} is?", "[Please|Now|Just|Kindly] [tell me|give me|say|state|find|write|repeat] {p}.", "Tell me {p}.",
        "Tell me what {p} is.", "I [want|need|wish|have|am eager] to [know|learn|hear|find out] {p}.", "I would [love|be glad|be happy|want] to [know|hear|learn] {p}.",
        "I [wonder|ask you|forgot|do not remember|am not sure|want to know|do not know] what {p} is.", "I [am looking for|am asking for|ask for|need|forgot] {p}.",
        "[My question is about|The question is|It is about|I ask about|This is about] {p}.", "[Let me know|Inform me of|Remind me of|Help me with|Look up|Find out] {p}.",
        "[Remind me|Let me know|Explain|Say|Write down|Show me]: what is {p}?", "Do you [know|remember|recall] {p}?", "Do you [know|remember|recall] what {p} is?",
        "What was {p} again?", "What [would|might|must|can] {p} be?", "I forgot {p}. What is it?", "What do you [think|believe|say] {p} is?",
        "[According to the text|In the text above|By the text|Going by the text|From what you read|As far as you know|From the above], what is {p}?",
        "{^p}?", "{^p}, please.", "{^p} is what?", "{^p}: what is it?", "Which is {p}?", "Name {p}.", "Give me {p}.", "What does the text say about {p}?",
        "What [did I|did they|did the text|does the text] say {p} is?", "[Do you remember|Can you say|Can you name|Can you recall] {p}?", "Say what {p} is.",
        "[Look it up|One question|Now tell me|A question|Next question|Question for you|Answer this|Quiz]: what is {p}?", "[Find|State|Recall|Repeat] {p}.",
        "How is {p} called?", "What have you learned about {p}?", "What do you know about {p}?", "What is the name of {p}?", "Somebody asks for {p}. What do you say?",
    ),
    TEST: ("Could you tell me {p}?", "I would like to know {p}.", "Please name {p}.", "Would you remind me what {p} is?", "Tell me, what is {p}?"),
}  # fmt: skip
RESTATES = {
    TRAIN: ("{^p} is", "{^p} is", "So {p} is", "[Therefore|In short|As we have seen|As was said|Again|Thus|And so|Once more|As you know|In a word|All in all|In the end], {p} is",
            "[Answer|Remember|Summary|So|Result]: {p} is", "[So we know|We have learned|This means|I said|It follows|We see|Now we know|It was said|Remember|It is true] that {p} is",
            "[And|Yes,|Well,|Now] {p} is"),
    TEST: ("To sum up, {p} is", "Now it is clear that {p} is"),
}  # fmt: skip
FOLLOW_SUBJECT = ("And {p}?", "And of {s}?", "And {s}?", "What about {s}?", "And what about {s}?", "And for {s}?", "The same for {s}, please.")
FOLLOW_NOUN = ("And the {n}?", "And {its} {n}?", "What about the {n}?", "And what is {its} {n}?", "What about {its} {n}?")
INTROS = {
    "country": ("{s} is [a country|a small country|a land|an old kingdom|an island] in the [north|south|east|west].", "{s} is a [proud|quiet|rich|green] country."),
    "city": ("{s} is [a city|a town|an old town|a busy city] [by the sea|on a hill|in the plain|near the border].", "{s} is a city."),
    "person": ("{s} is [a kind|a quiet|a busy|a cheerful|an honest] person.", "Let me tell you about {s}.", "This is {s}.", "I met {s} [yesterday|last week]."),
    "company": ("{s} is [a company|a firm|a small company].", "{s} is a company that many people know."),
    "ship": ("{s} is [a ship|an old ship|a fast ship].",), "planet": ("{s} is a planet [far away|behind the sun|without air].",),
    "place": ("Now about {s}.",), "named": ("This is about {s}.", "Here is what we know about {s}."), "me": ("Let me tell you about myself.",), "thing": ("Here are my notes.",),
}  # fmt: skip
