// BLAKE2b, the use order, and the prefix-block index of csrc/delta.
#include "delta/block_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace sic::delta {
namespace {

std::string hex(const uint8_t* bytes, size_t n) {
  std::string s;
  for (size_t i = 0; i < n; ++i) {
    s += "0123456789abcdef"[bytes[i] >> 4];
    s += "0123456789abcdef"[bytes[i] & 15];
  }
  return s;
}

std::string blake2b(const std::string& message, size_t bytes, const std::string& key = "", size_t piece = 1000) {
  Blake2b state(bytes, key.data(), key.size());
  for (size_t i = 0; i < message.size(); i += piece)
    state.update(message.data() + i, std::min(piece, message.size() - i));
  uint8_t digest[64];
  state.finish(digest);
  return hex(digest, bytes);
}

std::string counted(size_t n) {
  std::string s(n, 0);
  for (size_t i = 0; i < n; ++i) s[i] = static_cast<char>(i);
  return s;
}

// The example of RFC 7693; the others are the reference's known answers for messages 00 01 02 ... under the key 00 ...
// 3f.
TEST(Blake2b, KnownAnswers) {
  EXPECT_EQ(blake2b("abc", 64),
            "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
            "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
  EXPECT_EQ(blake2b("", 64, counted(64)),
            "10ebb67700b1868efb4417987acf4690ae9d972fb7a590c2f02871799aaa4786"
            "b5e996e8f0f4eb981fc214b005f42d2ff4233499391653df7aefcbc13fc51568");
  EXPECT_EQ(blake2b(counted(128), 64, counted(64)),
            "72065ee4dd91c2d8509fa1fc28a37c7fc9fa7d5b3f8ad3d0d7a25626b57b1b44"
            "788d4caf806290425f9890a3a2a35a905ab4b37acfd0da6e4517b2525c9651e4");
  EXPECT_EQ(blake2b(counted(255), 64, counted(64)),
            "142709d62e28fcccd0af97fad0f8465b971e82201dc51070faa0372aa43e9248"
            "4be1c1e73ba10906d5d1853db6a4106e0a7bf9800d373d6dee2d46d62ef2a461");
  EXPECT_EQ(blake2b("", 32), "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8");
  EXPECT_EQ(blake2b("abc", 1), "6b");
}

TEST(Blake2b, AnyPieces) {
  for (size_t n : {1, 127, 128, 129, 255, 256, 257, 1000})
    for (size_t piece : {1, 3, 127, 128, 129}) {
      EXPECT_EQ(blake2b(counted(n), 32, "key", piece), blake2b(counted(n), 32, "key", n)) << n << " by " << piece;
      EXPECT_EQ(blake2b(counted(n), 32, "", piece), blake2b(counted(n), 32, "", n)) << n << " by " << piece;
    }
}

// ---- the index ----

Label text(const char* s) { return {Label::Kind::text, s, std::strlen(s)}; }
Label bytes(const char* s) { return {Label::Kind::bytes, s, std::strlen(s)}; }

// A key that owns its tokens.
struct Block {
  std::vector<int32_t> ids;
  Handle parent = 0;
  Label space = text("a"), salt = {};
  operator BlockKey() const {  // NOLINT: it is one
    return {space, parent, tokens_of(ids.data(), static_cast<int64_t>(ids.size())), salt};
  }
};

BlockIndex::Options options(int64_t capacity) {
  BlockIndex::Options o;
  o.capacity = capacity;
  return o;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(BlockIndex, FindsWhatWasInserted) {
  BlockIndex index(options(10));
  const Block a{{1, 2, 3}};
  EXPECT_EQ(index.lookup(a), 0u);
  const Handle h = index.insert(a, 7);
  EXPECT_EQ(index.lookup(a), h);
  EXPECT_EQ(index.insert(a, 8), h);
  EXPECT_EQ(index.value(h), 7);
  const Block child{{4, 5, 6}, h};
  const Handle c = index.insert(child, 9);
  EXPECT_EQ(index.lookup(child), c);
  EXPECT_EQ(index.parent(c), h);
  EXPECT_EQ(index.children(h), 1);
  EXPECT_EQ(index.size(), 2);
  const auto s = index.stats();
  EXPECT_EQ(s.hits, 2);
  EXPECT_EQ(s.misses, 1);
  EXPECT_EQ(s.insertions, 2);
}

TEST(BlockIndex, KeysAreUnambiguous) {
  BlockIndex index(options(100));
  const std::vector<Block> blocks = {
      {{1, 23}, 0, text("X"), {}},      {{1, 23}, 0, {}, text("X")},    {{12, 3}, 0, text("X"), {}},
      {{1, 23}, 0, bytes("X"), {}},     {{1, 23}, 0, {}, {}},           {{1, 23}, 0, text("X"), text("X")},
      {{1, 23}, 0, text("XX"), {}},     {{1, 23}, 0, text(""), {}},     {{1, 23}, 0, bytes(""), {}},
      {{1}, 0, text("X"), {}},          {{1, 23, 0}, 0, text("X"), {}}, {{1, 23}, 0, text(""), text("X")},
      {{1, 23}, 0, text("X"), text("")}};
  std::set<Handle> handles;
  std::set<std::string> names;
  for (const Block& b : blocks) {
    EXPECT_EQ(index.lookup(b), 0u);
    const Handle h = index.insert(b, 0);
    handles.insert(h);
    names.insert(index.name(h).text());
  }
  EXPECT_EQ(handles.size(), blocks.size());
  EXPECT_EQ(names.size(), blocks.size());
}

TEST(BlockIndex, WideTokensAreKeysOfTheirOwn) {
  BlockIndex index(options(10));
  std::vector<int32_t> room(2);
  const int64_t small[] = {1, 2}, large[] = {1, int64_t{1} << 40}, low[] = {1, 0};
  const auto key = [&](const int64_t* ids) { return BlockKey{{}, 0, tokens_of(ids, 2, room.data()), {}}; };
  const Handle s = index.insert(key(small), 0), l = index.insert(key(large), 0), z = index.insert(key(low), 0);
  EXPECT_TRUE(s != l && l != z && s != z);
  const int32_t narrow[] = {1, 2};
  EXPECT_EQ(index.lookup({{}, 0, tokens_of(narrow, 2), {}}), s);
  EXPECT_EQ(index.lookup(key(large)), l);
}

TEST(BlockIndex, BlocksOfAnyLength) {
  BlockIndex index(options(64));
  std::vector<Handle> handles;
  const auto block = [](int n) { return Block{std::vector<int32_t>(static_cast<size_t>(n), 5)}; };
  const int lengths[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 100000};
  for (int n : lengths) handles.push_back(index.insert(block(n), n));
  for (size_t i = 0; i < handles.size(); ++i) {
    EXPECT_EQ(index.lookup(block(lengths[i])), handles[i]);
    EXPECT_EQ(index.value(handles[i]), lengths[i]);
    Block other = block(lengths[i]);
    other.ids.back() = 6;
    EXPECT_EQ(index.lookup(other), 0u);
  }
  EXPECT_EQ(index.clear(), 14);
  EXPECT_EQ(index.size(), 0);
}

TEST(BlockIndex, CollisionsAreCountedMisses) {
  BlockIndex index(options(1000), BlockDigest([](const std::string&) { return std::string("same"); }));
  std::vector<Handle> handles;
  for (int i = 0; i < 500; ++i) {
    EXPECT_EQ(index.lookup(Block{{i}}), 0u);
    handles.push_back(index.insert(Block{{i}}, i));
  }
  EXPECT_EQ(index.stats().collisions, 499);  // the first had nothing to collide with
  for (int i = 0; i < 500; ++i) EXPECT_EQ(index.lookup(Block{{i}}), handles[static_cast<size_t>(i)]);
  EXPECT_EQ(index.stats().collisions, 499);
  for (int i = 0; i < 500; i += 2) index.remove(handles[static_cast<size_t>(i)]);
  for (int i = 0; i < 500; ++i) EXPECT_EQ(index.lookup(Block{{i}}), i % 2 ? handles[static_cast<size_t>(i)] : 0u);
}

TEST(BlockIndex, EvictsTheOldestWithoutChildren) {
  BlockIndex index(options(4));
  std::vector<int64_t> freed;
  const Handle a = index.insert(Block{{1}}, 1);
  const Handle b = index.insert(Block{{2}, a}, 2);
  index.insert(Block{{3}}, 3);
  index.insert(Block{{4}}, 4);
  index.lookup(Block{{2}, a});
  index.insert(Block{{5}}, 5, false, &freed);  // 1 is older, but has a child
  EXPECT_EQ(freed, (std::vector<int64_t>{3}));
  index.insert(Block{{6}}, 6, false, &freed);
  EXPECT_EQ(freed, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(index.evict(1, &freed), 1);  // 2, and then its parent is the oldest
  EXPECT_EQ(index.evict(1, &freed), 1);
  EXPECT_EQ(freed, (std::vector<int64_t>{3, 4, 2, 1}));
  EXPECT_FALSE(index.contains(a));
  EXPECT_FALSE(index.contains(b));
  EXPECT_EQ(index.evict(10, &freed), 2);
  EXPECT_EQ(index.evict(10), 0);
}

// Parents that eviction has passed over go in the order of their use, whatever the order in which their children went.
TEST(BlockIndex, PassedParentsKeepTheirOrder) {
  BlockIndex index(options(20));
  std::vector<Handle> parents, children;
  for (int i = 0; i < 4; ++i) parents.push_back(index.insert(Block{{i}}, i));
  for (int i = 0; i < 4; ++i)
    children.push_back(index.insert(Block{{9}, parents[static_cast<size_t>(i)]}, 10 + i, true));
  index.insert(Block{{99}}, 99);
  std::vector<int64_t> freed;
  EXPECT_EQ(index.evict(1, &freed), 1);  // passes the parents
  for (int i : {2, 0, 3, 1}) {
    index.unpin(children[static_cast<size_t>(i)]);
    index.remove(children[static_cast<size_t>(i)]);
  }
  index.lookup(Block{{0}});  // the newest now
  index.insert(Block{{8}, parents[1]}, 18, true);
  EXPECT_EQ(index.evict(10, &freed), 3);
  EXPECT_EQ(freed, (std::vector<int64_t>{99, 2, 3, 0}));
  EXPECT_TRUE(index.contains(parents[1]));
}

TEST(BlockIndex, PinsHold) {
  BlockIndex index(options(2));
  const Handle a = index.insert(Block{{1}}, 1, true);
  const Handle b = index.insert(Block{{2}}, 2);
  EXPECT_EQ(index.lookup(Block{{2}}, true), b);
  index.pin(a);
  EXPECT_EQ(index.pins(a), 2);
  EXPECT_THROW(index.insert(Block{{3}}, 3), IndexFull);
  EXPECT_THROW(index.insert(Block{{3}, a}, 3), IndexFull);
  EXPECT_EQ(index.children(a), 0);
  EXPECT_NE(message_of([&] { index.insert(Block{{3}}, 3); }).find("BlockIndex.insert: capacity: got 2 entries"),
            std::string::npos);
  EXPECT_EQ(index.evict(5), 0);
  index.unpin(b);
  EXPECT_NE(index.insert(Block{{3}}, 3), 0u);
  EXPECT_FALSE(index.contains(b));
  index.unpin(a);
  EXPECT_EQ(index.stats().pinned, 1);
  index.unpin(a);
  EXPECT_EQ(index.stats().pinned, 0);
  EXPECT_THROW(index.unpin(a), ArgumentError);
}

TEST(BlockIndex, AParentIsNotEvictedForItsChild) {
  BlockIndex index(options(1));
  const Handle a = index.insert(Block{{1}}, 1);
  EXPECT_THROW(index.insert(Block{{2}, a}, 2), IndexFull);
  EXPECT_TRUE(index.contains(a));
  const Handle c = index.insert(Block{{3}}, 3);  // and a can still go
  EXPECT_FALSE(index.contains(a));
  EXPECT_TRUE(index.contains(c));
}

TEST(BlockIndex, StaleHandlesNeverMeanAnotherEntry) {
  BlockIndex index(options(1));
  std::set<Handle> seen;
  Handle last = 0;
  for (int i = 0; i < 1000; ++i) {
    const Handle h = index.insert(Block{{i}}, i);
    EXPECT_TRUE(seen.insert(h).second);
    if (last) {
      EXPECT_FALSE(index.contains(last));
      EXPECT_THROW(index.value(last), ArgumentError);
      EXPECT_THROW(index.pin(last), ArgumentError);
      EXPECT_THROW(index.remove(last), ArgumentError);
      EXPECT_THROW(index.insert(Block{{1}, last}, 0), ArgumentError);
      EXPECT_EQ(index.lookup(Block{{1}, last}), 0u);
    }
    last = h;
  }
  EXPECT_FALSE(index.contains(~Handle{0}));
  EXPECT_THROW(index.value(0), ArgumentError);
}

TEST(BlockIndex, PlacesWithoutHandlesLeftAreRetired) {
  BlockIndex::Options o = options(2);
  o.handle_bits = 6;  // 4 number the 12 places, 2 are left
  BlockIndex index(o);
  std::set<Handle> seen;
  EXPECT_THROW(for (int i = 0; i < 1000; ++i) EXPECT_TRUE(seen.insert(index.insert(Block{{i % 3}}, i)).second),
               IndexFull);
  EXPECT_GE(seen.size(), 4u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(index.lookup(Block{{i}}), 0u);
  o.handle_bits = 5;
  EXPECT_THROW(BlockIndex{o}, ArgumentError);
}

TEST(BlockIndex, RemoveAndClearAskForNoUsers) {
  BlockIndex index(options(8));
  const Handle a = index.insert(Block{{1}}, 1), b = index.insert(Block{{2}, a}, 2);
  EXPECT_THROW(index.remove(a), ArgumentError);
  index.pin(b);
  EXPECT_THROW(index.remove(b), ArgumentError);
  EXPECT_THROW(index.clear(), ArgumentError);
  EXPECT_EQ(index.size(), 2);
  index.unpin(b);
  EXPECT_EQ(index.remove(b), 2);
  EXPECT_EQ(index.remove(a), 1);
  EXPECT_EQ(index.clear(), 0);
}

TEST(BlockIndex, ParentsAreOfTheSameNamespace) {
  BlockIndex index(options(8));
  const Handle a = index.insert(Block{{1}, 0, text("a"), {}}, 1);
  EXPECT_THROW(index.insert(Block{{2}, a, text("b"), {}}, 2), ArgumentError);
  index.insert(Block{{2}, a, text("a"), text("salt")}, 2);
  EXPECT_EQ(index.lookup(Block{{2}, a, text("b"), text("salt")}), 0u);
  EXPECT_EQ(index.lookup(Block{{2}, a, text("a"), {}}), 0u);
}

TEST(BlockIndex, MatchesTheLongestChain) {
  BlockIndex index(options(100));
  std::vector<int32_t> ids(50);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  std::vector<Handle> chain;
  for (int b = 0; b < 5; ++b)
    chain.push_back(index.insert({text("a"), b ? chain.back() : 0, tokens_of(ids.data() + 8 * b, 8), {}}, b));
  const auto match = [&](int64_t n, bool pin) { return index.match(text("a"), tokens_of(ids.data(), n), 8, {}, pin); };
  EXPECT_EQ(match(50, false), chain);
  EXPECT_EQ(match(39, false), std::vector<Handle>(chain.begin(), chain.begin() + 4));
  EXPECT_TRUE(match(7, false).empty());
  EXPECT_EQ(match(16, true).size(), 2u);
  EXPECT_EQ(index.stats().pinned, 2);
  EXPECT_TRUE(index.match(text("b"), tokens_of(ids.data(), 50), 8, {}).empty());
  const auto names = index.names(text("a"), tokens_of(ids.data(), 50), 8, {});
  ASSERT_EQ(names.size(), 6u);
  for (size_t b = 0; b < 5; ++b) EXPECT_EQ(names[b].text(), index.name(chain[b]).text());
}

TEST(BlockIndex, NamesAreFixed) {
  BlockIndex index(options(4));
  const Handle a = index.insert(Block{{1, 2, 3}, 0, text("X"), {}}, 0);
  const Handle b = index.insert(Block{{4}, a, text("X"), bytes("s")}, 0);
  const auto name = [&](Handle h) { return hex(index.name(h).bytes, index.name(h).size); };
  EXPECT_EQ(name(a), "374c5348c74e676a735280286a1c297ccb57475ebb2ceafa78a3b1bd8ee9ca0f");
  EXPECT_EQ(name(b), "bc754d998db6b91e7f1e2757c891780137619d7f54ea7977c4056ffe5fc73bf0");
}

TEST(BlockIndex, BadArguments) {
  EXPECT_THROW(BlockIndex{options(0)}, ArgumentError);
  EXPECT_THROW(BlockIndex{options(-1)}, ArgumentError);
  EXPECT_THROW(BlockIndex{options(int64_t{1} << 40)}, ArgumentError);
  BlockIndex::Options o = options(1);
  o.block_size = 0;
  EXPECT_THROW(BlockIndex{o}, ArgumentError);
  for (const char* name : {"", "blake2b-", "blake2b-0", "blake2b-12", "blake2b-72", "md5"})
    EXPECT_THROW(BlockDigest{std::string(name)}, ArgumentError) << name;
  EXPECT_THROW(BlockDigest("blake2b", std::string(65, 'k')), ArgumentError);
  BlockIndex index(options(1));
  EXPECT_EQ(message_of([&] { index.lookup(Block{}); }),
            "BlockIndex.lookup: tokens: got 0 tokens, expected 1 to 2^31 - 1 tokens");
  EXPECT_THROW(index.evict(-1), ArgumentError);
  EXPECT_THROW(index.match({}, Block{{1}}.operator BlockKey().tokens, 0, {}), ArgumentError);
  for (size_t n : {0, 33}) {
    BlockIndex other(options(1), BlockDigest([n](const std::string&) { return std::string(n, 'x'); }));
    EXPECT_THROW(other.insert(Block{{1}}, 0), ArgumentError);
  }
}

// Whatever threads do, a handle that was found is the block that was asked for, or is gone.
TEST(BlockIndex, ManyThreads) {
  for (const char* digest : {"blake2b", "blake2b-8"}) {
    BlockIndex index(options(64), BlockDigest(std::string(digest)));
    std::atomic<int> wrong{0};
    const auto work = [&](unsigned seed) {
      std::mt19937 random(seed);
      for (int step = 0; step < 5000; ++step) {
        const int32_t id = static_cast<int32_t>(random() % 200);
        const Block block{std::vector<int32_t>(static_cast<size_t>(id % 40 + 1), id)};
        const Handle h = random() % 2 ? index.insert(block, id, true) : index.lookup(block, true);
        if (h == 0) continue;
        wrong += index.value(h) != id;
        index.unpin(h);
        if (step % 100 == 0) index.evict(random() % 8);
      }
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
    for (auto& t : threads) t.join();
    EXPECT_EQ(wrong, 0);
    const auto s = index.stats();
    EXPECT_EQ(s.pinned, 0);
    EXPECT_LE(s.entries, 64);
    EXPECT_EQ(s.insertions, s.entries + s.evictions + s.removals);
    EXPECT_EQ(index.clear(), s.entries);
  }
}

}  // namespace
}  // namespace sic::delta
