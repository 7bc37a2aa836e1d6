"""The plots of the stories: for each, the slots it needs and its beats, every beat a set of wordings."""

# ruff: noqa: E501, SIM905 - wordings and word lists read better as they are

OPENINGS = (
    "Once upon a time, in {place}, there lived {a trait} {role} [named|called] {hero}.",
    "Once upon a time, there was {a trait} {role} [named|called] {hero} who lived in {place}.",
    "Once upon a time, {a trait} {role} [named|called] {hero} lived in {place}.",
    "Long ago, in {place}, there lived {a trait} {role} [named|called] {hero}.",
    "In {place} there lived {a trait} {role}. {^his} name was {hero}.",
    "{hero} was {a trait} {role} who lived in {place}.",
    "There once was {a trait} {role} in {place}, and {his} name was {hero}.",
    "Many years ago, {a trait} {role} named {hero} lived in {place}.",
    "Far away, in {place}, {a trait} {role} named {hero} had a little house.",
    "This is the story of {hero}, {a trait} {role} from {place}.",
    "[One|On a] [winter|summer|spring|autumn] [evening|morning|night], {hero} the {role} [was sitting by the fire|was walking home|could not sleep|was looking out of the window]. "
    "{^he} lived in {place} and was [known as {a trait} {role}|always {trait}].",
    "{hero} the {role} lived in {place}. {^he} was {trait} and [had few friends|had many friends|never complained|liked to laugh].",
    "{hero} lived in {place}. {^he} was {a trait} {role}.",
    "{hero} had never [seen a king|left {place}|been afraid|had a real friend], for {he} was only {a trait} {role} in {place}.",
    "Once there was {a trait} {role}. {^his} name was {hero}, and {he} lived in {place}.",
    "Once upon a time, {a role} named {hero} lived in {place}. {^he} was [very|quite|always] {trait}.",
    "[Have you heard|Do you know the story] of {hero}? {^he} was {a trait} {role} in {place}.",
    "A long time ago, when [animals could speak|the world was young|winters were long], there lived {a trait} {role} named {hero} in {place}.",
    "The {role} {hero} was {trait}, and everyone in {place} knew it.",
    "The {trait} {role} [opened the door and looked out|closed the book and sighed|put down {his} cup and listened|lit a candle and sat down]. "
    "{^his} name was {hero}, and {he} lived in {place}.",
    "It was a [dark|cold|warm|quiet] [night|morning|evening], and [{weather}|nobody was outside|everything was still]. "
    "{hero}, {a trait} {role} from {place}, [could not sleep|was still awake|was sitting by the window].",
)
HABITS = (
    "[Every morning|Each day], {he} [opened the window and greeted the sun|drank a cup of tea and looked at the sky|swept the floor and sang a song].",
    "{^he} loved {food} and [quiet evenings|long walks|old songs|the smell of rain|the sound of the wind].",
    "[Everyone|Everybody] in {village} [liked {him}|knew {him} well|called {him} a good friend], because {he} [always had time to listen|never broke a promise|was kind to all].",
    "{^he} lived [alone|with {his} {relative}|with an old {pet}] in a [small|narrow|crooked|cosy] house with {a colour} door.",
    "{^his} best friend was {helper}, {a helper_role} who lived [next door|across the road|at the end of the lane].",
    "[On Sundays|In the evenings|After work], {he} [played the {instrument}|told stories to the children|walked with {helper}, the {helper_role}].",
)
PLACES = {
    "sea": (
        "a small village by the sea",
        "a fishing village by the sea",
        "a little town on the coast",
        "a harbour town by the grey sea",
        "a quiet village near the ocean",
        "a white house by the sea",
    ),
    "forest": (
        "a small village at the edge of the forest",
        "a village near a deep forest",
        "a hut in the middle of the woods",
        "a little house between tall trees",
        "a green valley full of old trees",
        "the heart of a great forest",
    ),
    "mountain": (
        "a small village in the mountains",
        "a stone house high in the hills",
        "a village under a snowy mountain",
        "a town between two mountains",
        "a lonely valley in the north",
    ),
    "plain": (
        "a small village by a river",
        "a busy town with a round square",
        "a farm on a wide plain",
        "a village of ten houses",
        "a small town with a tall tower",
        "a faraway kingdom",
        "a land of lakes and meadows",
        "an old city with narrow streets",
    ),
}
SPOTS = {
    "sea": ("on the beach", "by the harbour", "near the lighthouse", "among the rocks", "under an old net", "behind the fish market"),
    "forest": ("under the oak", "by the stream", "in the hollow tree", "among the ferns", "near the old mill", "behind the woodpile"),
    "mountain": ("by the waterfall", "in the cave", "on the high path", "near the stone bridge", "behind the chapel", "in the sheep hut"),
    "plain": ("behind the barn", "by the well", "in the market", "near the river", "under the bridge", "in the orchard"),
}
TRAITS = """young old kind clever shy brave curious quiet cheerful poor patient careful stubborn gentle lonely honest merry forgetful proud
hard-working friendly little thoughtful""".split()
WEATHERS = (
    "a cold wind blew",
    "the rain fell softly",
    "the sun shone",
    "fog lay over the land",
    "snow covered the roofs",
    "the air smelled of rain",
)
TIMES = (
    "One [morning|evening|afternoon|night|day], ",
    "One [cold|warm|bright|grey|windy] [morning|evening|day], ",
    "Then one day, ",
    "On a [rainy|sunny|misty] [morning|afternoon], ",
    "Early [one morning|in the spring|in the autumn], ",
    "That [summer|winter|spring|autumn], ",
)
ENDINGS = (
    "From that day on, {hero} and {helper} were [the best of friends|always together|like family].",
    "And {thankful} [never forgot|always remembered] what {kind} had done for {hkind}.",
    "That night, {hero} [slept well|fell asleep with a smile|dreamed of the {spot_noun}].",
    "[And so|In the end], {hero} learned that {moral}.",
    "{hero} smiled, for now {he} knew that {moral}.",
    "And they all lived happily in {village}.",
    '"[You see|Remember]," {helper} [said|would say later], "{moral}."',
    "To this day, people in {village} tell the story of {hero} and the {object}.",
)

# A plot: its name, the moral, where it can happen ("" anywhere), whether an animal can be the hero, and its beats.
PLOTS = (
    (
        "lost",
        "it is good to ask for help",
        "",
        True,
        (
            (
                "{time}{he} noticed that {his} {colour} {object} was gone.",
                "{time}{hero} reached for {his} {colour} {object}, but it was not there.",
                "{time}{hero} could not find {his} {colour} {object} anywhere.",
                "When {hero} [came home|woke up|opened the cupboard] one evening, {his} {colour} {object} was gone.",
            ),
            (
                "{^he} was very sad, because {his} {relative} had given it to {him}.",
                "It was a gift from {his} {relative}, so {he} [began to cry|felt sick with worry|could not think of anything else].",
                "{^he} needed it, because {he} had promised to bring it to {his} {relative}.",
            ),
            (
                "First {he} looked {spot}, but there was nothing there. Then {he} looked {spot2}, but found only [dry leaves|an old shoe|a sleeping cat].",
                "{^he} searched {spot} and {spot2}, but [the {object} was not there|found nothing].",
                "{^he} looked under the bed, behind the door and {spot}. Nothing.",
            ),
            (
                'At last {he} asked {helper}, {a helper_role}. "[Let us look together|Two see more than one|I will help you]," {helper} said.',
                '{helper}, the {helper_role}, saw {him} and asked, "Why are you so sad?" {hero} told {hhim} everything.',
                'Then {he} met {helper}, {a helper_role}, who said, "Tell me where you saw it last."',
            ),
            (
                "They walked back [step by step|the whole way|slowly] and found the {object} {found}.",
                "Together they searched until dark, and there it was: the {object} lay {found}.",
                "{helper} remembered that {hhe} had seen something {colour} {found}. They ran there, and it was the {object}.",
            ),
            (
                "A {thief} had carried it there because it [was so bright|smelled of {food}|looked like a good nest].",
                "It had fallen out of {his} bag because the bag had a hole.",
                "The wind had blown it there in the night.",
            ),
            (
                "{hero} was so happy that {he} gave {helper} some {food}.",
                '"Thank you," said {hero}. "I should have asked you sooner."',
                "{hero} thanked {helper} and mended the bag the same evening.",
            ),
        ),
    ),
    (
        "storm",
        "many hands make light work",
        "",
        True,
        (
            ("{time}a great storm came over {village}.", "{time}dark clouds came up, and soon a storm shook every house in {village}."),
            (
                "The wind tore the roof from the house of {helper}, the {helper_role}.",
                "The storm broke the [bridge|fence|old wall] and flooded the house of {helper}, the {helper_role}.",
                "Because of the storm, {helper}, the {helper_role}, lost [almost everything|{hhis} roof|{hhis} whole garden].",
            ),
            (
                "{helper} sat [in the rain|in front of the house] and did not know what to do.",
                '"What shall I do now?" {helper} asked. "Winter is coming."',
            ),
            (
                "{hero} did not wait. {^he} brought [wood and nails|a hammer and a rope|warm blankets] and {food}.",
                "When {hero} heard about it, {he} went from door to door and asked everyone to help.",
                "{hero} took {his} {object} and went to help at once.",
            ),
            (
                "Some people carried stones, others cut wood, and the children cooked {food}.",
                "One neighbour brought nails, another brought boards, and {hero} worked until {his} hands hurt.",
                "At first only three came. Then ten came, and then the whole village.",
            ),
            (
                "After {number} days, the house stood again, [stronger than before|and it was even more beautiful].",
                "It took {number} days, but then the work was done.",
            ),
            (
                "{helper} had tears in {hhis} eyes and gave {hero} {a object2} as thanks.",
                "To thank them all, {helper} made a big feast with {food}.",
            ),
        ),
    ),
    (
        "friend",
        "a small word can begin a great friendship",
        "",
        True,
        (
            (
                "But {hero} had no friends, because {he} was too shy to speak.",
                "{hero} often felt alone, because {he} never dared to talk to anyone.",
            ),
            (
                "{time}a stranger named {helper} came to {village}. {^hhe} was {a helper_role} and carried {a colour} {object}.",
                "{time}{helper}, {a helper_role} with {a colour} {object}, moved into the empty house.",
            ),
            (
                "{hero} watched {hhim} from behind a tree and wondered what the {object} was for.",
                "{hero} wanted to say hello, but the words stuck in {his} throat.",
            ),
            (
                "Then the {object} [fell|rolled down the hill|slipped from {hhis} hands], right in front of {hero}.",
                "The next day it rained, and {helper} stood under the same tree as {hero}.",
            ),
            (
                '"Is this yours?" {hero} asked [very softly|in a small voice]. "Yes," said {helper}, "and thank you. What is your name?"',
                '"[Hello|Good day]," {hero} whispered. {helper} laughed [kindly|gently]. "I hoped that you would speak to me," {hhe} said.',
            ),
            (
                "They talked until the sun went down, and they found out that they both loved {food}.",
                "They shared some {food} and told each other stories until it was dark.",
                "{helper} showed {him} how to play the {instrument}, and {hero} showed {hhim} the way {spot_to}.",
            ),
        ),
    ),
    (
        "remedy",
        "love gives us strength",
        "",
        True,
        (
            ("{time}{his} {relative} became very ill.", "{time}{his} {relative} fell ill and could not get up."),
            (
                '"Only the {colour} {flower} can help," said {helper}, the {helper_role}. "It grows {found}."',
                '{helper}, the {helper_role}, shook {hhis} head. "You need tea made from the {colour} {flower} that grows {found}."',
            ),
            (
                "{hero} took {his} {object} and some {food} and set out at once.",
                "So {hero} packed some {food}, took {his} {object}, and left before sunrise.",
            ),
            (
                "The way was long, and {weather}, but {he} did not turn back.",
                "On the first day {he} crossed a river. On the second day {he} climbed a hill. On the third day {he} was so tired that {he} could hardly walk.",
            ),
            (
                "On the way {he} met {a thief} whose foot was caught under a stone. {hero} lifted the stone and set it free.",
                "{^he} heard a cry and found {a thief} in a net. {hero} opened the net and let it go.",
            ),
            (
                '"I know where the {flower} grows," said the {thief}. "Follow me." And it led {him} to the place.',
                "Because {he} had helped it, the {thief} showed {him} the way to the {flower}.",
            ),
            (
                "{hero} picked one {flower}, ran home, and made the tea. The next morning, {his} {relative} was well again.",
                "{^he} came home just in time. {^his} {relative} drank the tea, and after {number} days {he2} could laugh again.",
            ),
        ),
    ),
    (
        "contest",
        "practice is worth more than luck",
        "",
        True,
        (
            (
                "{time}the people of {village} held a great [race|contest|fair], and the prize was {a colour} {object}.",
                "{time}{a colour} {object} was promised to the [fastest runner|best singer|best cook] in {village}.",
            ),
            (
                "{hero} wanted to win it for {his} {relative}, whose own {object} was broken.",
                "{hero} wanted the {object} more than anything, because {he} had never won before.",
                "When {hero} saw the {object}, {he} could think of nothing else.",
            ),
            (
                "On the first try, {he} [fell|failed|came last], and some people laughed.",
                "But the first time {he} tried, everything went wrong.",
            ),
            (
                '"Do not give up," said {helper}, the {helper_role}. "I will practise with you."',
                '{helper}, {a helper_role}, did not laugh. "Come to me every evening," {hhe} said.',
            ),
            (
                "For {number} weeks they practised {spot}, in sun and rain.",
                "Day after day they practised {spot}, until {hero} could do it with closed eyes.",
            ),
            (
                "When the great day came, {hero} [was calm|took a deep breath|thought of {helper}] and did {his} best.",
                "On the day of the contest, {his} legs were shaking, but {he} looked at {helper} and began.",
            ),
            (
                "{^he} won, and everyone cheered. {^he} gave half of the prize money to {helper}.",
                "{^he} came second, but {he} was not sad, because {he} had never been so good before. The winner even let {him} keep the {object}.",
                "{hero} won the {object} and carried it home [proudly|with a big smile].",
            ),
        ),
    ),
    (
        "stranger",
        "kindness always comes back",
        "",
        False,
        (
            (
                "{time}someone knocked at the door. It was {a old_trait} {helper_role} named {helper}, and {weather}.",
                "{time}{helper}, {a old_trait} {helper_role}, came to {village} and asked for [food|a place to sleep].",
            ),
            (
                "Everyone else had sent {hhim} away, because they [did not trust strangers|had little themselves|were afraid].",
                "The other houses had stayed dark, but {hero} opened the door.",
                "When {helper} had knocked at the other houses, nobody had opened.",
            ),
            (
                "{hero} had only a little {food}, but {he} shared it with {hhim}.",
                '"Come in," said {hero}, and brought a warm blanket and {his} last {food}.',
            ),
            (
                "The next morning, {helper} was gone, but on the table lay {a colour} {object}.",
                'Before {hhe} left, {helper} gave {him} {a colour} {object}. "You will need it one day," {hhe} said.',
            ),
            (
                "{hero} did not know what it was good for, so {he} kept it [on a shelf|in a drawer|under {his} bed].",
                "{hero} thanked {hhim} and kept the {object} in {a container}.",
            ),
            (
                "In the winter, when there was nothing left to eat, {he} looked at the {object} and saw that it was full of gold coins.",
                "A year later, a rich merchant saw the {object} and paid a hundred coins for it.",
                "When the well of {village} ran dry, {hero} touched the ground with the {object}, and clear water came up.",
            ),
            (
                "{hero} shared everything with {his} neighbours, even with those who had sent {helper} away.",
                "Now nobody in {village} was hungry any more, and every door was open for strangers.",
            ),
        ),
    ),
    (
        "noise",
        "most things are less frightening in the light",
        "",
        True,
        (
            (
                "{time}{hero} heard a strange noise {spot}. It went [knock, knock, knock|scratch, scratch|hoo, hoo].",
                "{time}a strange sound woke {hero}. It came from somewhere {spot}.",
            ),
            (
                "{^he} pulled the blanket over {his} head, because {he} was afraid that it was [a ghost|a monster|a thief].",
                "{^his} heart beat fast, and {he} did not dare to look.",
            ),
            (
                'In the morning {he} told {helper}, the {helper_role}. "Tonight we will look together," {helper} said.',
                'The next day {he} asked {helper}, {a helper_role}, what it could be. "There is only one way to know," said {helper}.',
            ),
            (
                "So when it was dark, they took {a object} and a lamp and went out [very quietly|on tiptoe].",
                "That night they lit a lamp, took each other by the hand, and went to see.",
            ),
            (
                "There, {spot}, sat {a thief}. It had [hurt its leg|lost its mother|caught its foot in a rope] and was crying for help.",
                "And what did they find? A little {thief}, which was cold and hungry.",
            ),
            (
                '{hero} laughed. "You were more afraid than I was," {he} said, and gave it some {food}.',
                "They gave it {food} and warm milk, and soon it was asleep.",
                "When {hero} saw it, {he} had to laugh. Then {he} gave it some {food}.",
            ),
            (
                "After {number} days the {thief} was well again, but it came back every evening to visit {hero}.",
                "The {thief} stayed, and {hero} was never afraid of the dark again.",
            ),
        ),
    ),
    (
        "garden",
        "patience makes things grow",
        "",
        False,
        (
            (
                "{time}{his} {relative} gave {him} {number} seeds in {a colour} {container}.",
                "{time}{hero} found {number} strange seeds in an old {container}.",
            ),
            (
                "{^he} planted them {spot} and gave them water every day.",
                "When {hero} had planted them {spot}, {he} gave them water every day.",
                "{hero} dug a small bed {spot} and put the seeds into the earth.",
            ),
            (
                'But it did not rain for weeks, and nothing grew. "Give up," the neighbours said.',
                "Days passed, then weeks, and the earth stayed bare, because it was too dry.",
            ),
            (
                "Only {helper}, the {helper_role}, believed in {him}. Together they dug a ditch from the river.",
                "{helper}, {a helper_role}, showed {him} how to carry water with {a object}.",
            ),
            (
                "One morning, a tiny green leaf came out of the ground. Soon there were many.",
                "Then, at last, the first green leaves came up.",
            ),
            (
                "In the autumn the garden was full of [beans|berries|carrots|melons|pumpkins], enough for the whole village.",
                "By the end of the summer, there stood the most beautiful {flower} that anyone had ever seen.",
            ),
        ),
    ),
    (
        "honest",
        "the truth is lighter than a lie",
        "",
        True,
        (
            (
                "{time}{hero} broke the {colour} {object} of {helper}, the {helper_role}, while {he} was playing.",
                "{time}{hero} borrowed {a colour} {object} from {helper}, the {helper_role}, and dropped it [into the water|on the stones].",
            ),
            (
                "{^he} was afraid that {helper} would be angry, so {he} hid the pieces {spot}.",
                "Because {he} was ashamed, {he} said nothing and hid it {spot}.",
            ),
            (
                "That evening {he} could not eat {his} {food}, and at night {he} could not sleep.",
                "But the secret was heavy. Even {his} favourite {food} had no taste.",
            ),
            (
                'In the morning {helper} asked, "Have you seen my {object}?" {hero} became red.',
                "The next day {helper} was looking for the {object} everywhere, and {hero} felt worse and worse.",
            ),
            ('"I broke it," {he} said at last. "I am sorry."', "Then {hero} took a deep breath and told {hhim} the truth."),
            (
                '{helper} was silent for a while. Then {hhe} smiled. "A thing can be mended," {hhe} said. "I am glad that you told me."',
                '"I was angry about the {object}," said {helper}, "but I am happy that I can trust you."',
            ),
            (
                "They mended the {object} together, and it looked almost like new.",
                "{hero} worked for {number} days to pay for a new one, and {he} felt light again.",
            ),
        ),
    ),
    (
        "craft",
        "every master was once a beginner",
        "",
        False,
        (
            (
                "{time}{he} saw {helper}, {a helper_role}, making {a object}, and {he} could not look away.",
                "More than anything, {hero} wanted to learn how to make {a object}.",
            ),
            (
                '"Will you teach me?" {he} asked. "It is hard work," said {helper}, "but you may try."',
                "So {he} went to {helper}, the best {helper_role} in {village}, and asked to be taught.",
            ),
            (
                "{^his} first {object} broke after one day. {^his} second one was crooked.",
                "The first {object} that {he} made was so bad that {helper} had to laugh.",
            ),
            (
                "{^he} wanted to give up, but {helper} took out {hhis} own first {object}, which was just as bad.",
                '"Look," said {helper}, and took an ugly old {object} from the shelf. "I made this when I began."',
            ),
            (
                "So {hero} tried again, and again, for {number} long months.",
                "{hero} laughed and went back to work, and every day {he} learned something.",
            ),
            (
                "At last {he} made {a colour} {object} that was so beautiful that the {ruler} bought it.",
                "In the spring, {he} made a perfect {colour} {object} and gave it to {helper}.",
            ),
        ),
    ),
    (
        "rescue",
        "courage means to go although you are afraid",
        "",
        True,
        (
            (
                "{time}{helper}, {a helper_role}, did not come home, and {weather}.",
                "{time}little {helper} was lost, and it was getting dark.",
            ),
            (
                'Everyone was worried. "It is too dangerous to go out now," they said.',
                "The people of {village} stood [at the gate|in the square] and did not know where to look.",
            ),
            (
                "But {hero} took {his} {object} and a lamp and went out into the night.",
                "{hero} was afraid too, but {he} took a lamp and {a object} and left.",
                "When {hero} heard about it, {he} took {his} {object} and a lamp and went out into the night.",
            ),
            (
                "{^he} called and called. At last {he} heard a weak voice {spot}.",
                "{^he} followed the footprints until they ended {spot}. There {he} heard someone crying.",
            ),
            (
                "{helper} had hurt {hhis} foot and could not walk, because a branch had fallen on it.",
                "{helper} had fallen into a hole and could not get out.",
            ),
            (
                "{hero} used the {object} to pull {hhim} out and carried {hhim} home on {his} back.",
                "{hero} put {his} coat around {hhim}, gave {hhim} some {food}, and then they walked home, step by step.",
            ),
            ("When they came back, all the bells of {village} were ringing.", "The whole village was waiting with hot {food}."),
        ),
    ),
    (
        "quarrel",
        "sharing is wiser than fighting",
        "",
        False,
        (
            (
                "{time}{hero} and {helper}, the {helper_role}, had a quarrel about {a colour} {object}.",
                "{time}{hero} and {his} neighbour {helper}, {a helper_role}, both wanted the same {colour} {object}.",
            ),
            (
                '"I saw it first," said {hero}. "But I need it more," said {helper}.',
                "Each of them said that it was {his} own, and nobody knew the truth.",
            ),
            (
                "For {number} weeks they did not speak to each other.",
                "They shouted so loudly that all the birds flew away, and then they did not speak for {number} days.",
            ),
            (
                "In the end they went to the {ruler}, who listened and thought for a long time.",
                "At last the {ruler} called them both and asked them to tell the story.",
            ),
            (
                '"Then I will break it in two," said the {ruler}. "No!" cried {hero}. "Then let {helper} have it. It is too beautiful to be broken."',
                '"You may keep it for one month," said the {ruler} to {hero}, "and then {helper} may keep it for one month."',
            ),
            (
                '{helper} was surprised. "No," {hhe} said, "let us use it together."',
                'When {helper} heard that, {hhe} was surprised. "No," {hhe} said, "let us use it together."',
                "They looked at each other and began to laugh, because it was so simple.",
            ),
        ),
    ),
    (
        "lighthouse",
        "one small light can save many",
        "sea",
        False,
        (
            (
                "{time}the lamp of the lighthouse went out, because {helper}, the keeper, was ill.",
                "{time}a storm put out the light of the lighthouse, and {helper}, the keeper, could not climb the stairs.",
            ),
            (
                "Far out at sea there were {number} boats, and they could not see the rocks.",
                "{number} fishing boats were still out at sea, and the waves were as high as houses.",
            ),
            (
                "{hero} saw it from {his} window. {^he} took {his} {object} and ran.",
                "When {hero} saw that the tower was dark, {he} ran out into the rain with {his} {object}.",
            ),
            (
                "There were two hundred steps, and the wind howled, but {he} climbed up to the top.",
                "The door was stuck, so {he} broke it open and climbed the two hundred steps.",
            ),
            (
                "{^his} hands were cold, but at the third try the lamp burned again.",
                "{^he} poured oil into the lamp, and soon the light shone over the water.",
            ),
            (
                "One after the other, the boats came home. Nobody was lost.",
                "The sailors saw the light, turned their boats, and came safely into the harbour.",
            ),
            (
                '{helper} pressed {his} hand. "Tonight you were the keeper," {hhe} said.',
                "The sailors brought {hero} a basket of fish and {a object2}.",
            ),
        ),
    ),
    (
        "boat",
        "it is never too late to come home",
        "sea",
        False,
        (
            ("{time}{hero} found an old boat {spot}, half covered with sand.", "{time}an empty boat drifted to the shore near {village}."),
            (
                "On its side was a name: {helper}. Nobody in {village} knew it.",
                "In the boat lay {a colour} {object} with the name {helper} on it.",
            ),
            (
                "{hero} mended the boat with wood and tar, because {he} wanted to find the owner.",
                "{hero} could not stop thinking about the name, so {he} asked every sailor who came by.",
                "When {hero} saw the name, {he} wanted to find the owner, so {he} mended the boat with wood and tar.",
            ),
            (
                "After {number} weeks, {he} sailed to the island across the bay.",
                'An old sailor told {him}, "{helper} lives on the island across the bay." So {hero} sailed there.',
            ),
            (
                'There lived {a helper_role}, all alone. "My boat!" {hhe} cried. "I lost it in a storm and could not go home."',
                "On the beach stood {a helper_role} and waved. It was {helper}, who had lost the boat {number} years ago.",
            ),
            (
                "{hero} took {hhim} home, and the whole village ate {food} together.",
                "They sailed back together, and {helper} saw {hhis} family again.",
            ),
        ),
    ),
    (
        "wolf",
        "even the wild ones have a heart",
        "forest",
        False,
        (
            (
                "{time}{hero} met a wolf {spot}. Its paw was caught in a trap.",
                "{time}{hero} found a grey wolf {spot}. It could not walk, because there was a thorn in its paw.",
            ),
            (
                "{^he} wanted to run away, but the wolf looked so sad that {he} stayed.",
                '"Do not be afraid," said the wolf. "I only want to go home."',
                "When {hero} came nearer, the wolf did not move.",
            ),
            (
                "With shaking hands, {hero} set it free and bound its paw with a strip of {his} coat.",
                "{hero} helped the wolf and gave it some {food}.",
            ),
            (
                "In the winter, {hero} and {helper}, the {helper_role}, lost their way in the snow.",
                "Months later, {hero} was walking with {helper}, {a helper_role}, when the fog came and they could not see the path.",
            ),
            (
                "Then they heard a howl. The same wolf stood on a hill and looked back at them.",
                "Suddenly there were two bright eyes. {helper} was afraid, but {hero} knew the wolf at once.",
            ),
            ("It led them through the trees, all the way to {village}.", "They followed the wolf, and before midnight they were home."),
        ),
    ),
)
