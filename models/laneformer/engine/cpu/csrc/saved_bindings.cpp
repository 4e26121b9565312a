#include "saved_bindings.h"

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "../../schedule/bindings.h"

namespace laneformer {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ro, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<int>;

// A cache's memory that is filled before a schedule adopts it.
struct CachePages {
  explicit CachePages(KvMemory& of) : kv(of), memory(of.make()) {}
  CachePages(CachePages&&) = default;  // and no copies
  KvMemory& kv;
  KvMemory::Cache memory;
};

void expect_segment(const KvMemory& kv, int index) {
  if (index < 0 || index >= kv.segments()) throw std::invalid_argument("no segment " + std::to_string(index));
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> segment_of_pages(nb::handle self, int index) {
  CachePages& pages = nb::cast<CachePages&>(self);
  expect_segment(pages.kv, index);
  if (pages.memory.empty()) throw std::invalid_argument("these pages have been adopted");
  const KvMemory::Segment found = pages.kv.segment(pages.memory, index);
  return {reinterpret_cast<uint8_t*>(found.bytes), {found.size}, self};
}

nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> segment_of_cache(nb::handle self, int cache, int index) {
  KvMemory& kv = nb::cast<Decoder&>(self).executor.kv();
  expect_segment(kv, index);
  const KvMemory::Segment found = kv.segment(cache, index);
  return {reinterpret_cast<const uint8_t*>(found.bytes), {found.size}, self};
}

// Returns the bytes of a position, the positions of a page, and whether each segment belongs to a layer with a window.
nb::tuple layout(Decoder& decoder) {
  const KvMemory& kv = decoder.executor.kv();
  std::vector<bool> windowed;
  for (int i = 0; i < kv.segments(); ++i) windowed.push_back(kv.windowed_segment(i));
  return nb::make_tuple(kv.position_bytes(), kv.shape().page, windowed);
}

nb::object begin_saving(Decoder& decoder, Prefixes::Save what) {
  std::optional<Prefixes::Saving> found;
  {
    nb::gil_scoped_release release;
    found = decoder.schedule().prefixes().begin_saving(what);
  }
  if (!found) return nb::none();
  Prefixes::Contents& contents = found->contents;
  return nb::make_tuple(found->cache, to_numpy(std::move(contents.ids)), contents.starts,
                        to_numpy(std::move(contents.dropped)));
}

bool adopt(Decoder& decoder, CachePages& pages, Ids ids, Ids starts, Bytes dropped) {
  const ModelSpec& spec = decoder.model.spec();
  expect_ids(ids, spec.vocab);
  if (&pages.kv != &decoder.executor.kv() || pages.memory.empty() || ids.size() > size_t(spec.context))
    throw std::invalid_argument("pages of another decoder, or more ids than the context has");
  Prefixes::Contents contents{std::move(ids), std::move(starts), {dropped.data(), dropped.data() + dropped.size()}};
  return decoder.schedule().prefixes().adopt(std::move(contents), [&](int cache) {
    pages.kv.give(cache, std::exchange(pages.memory, {}));
  });
}

int start_in(Decoder& decoder, Bytes dropped, int shared) {
  return decoder.schedule().prefixes().start_in({dropped.data(), dropped.data() + dropped.size()}, shared);
}

}  // namespace

void bind_saved(nb::module_& m, nb::class_<Decoder>& decoder) {
  using namespace nb::literals;
  nb::class_<CachePages>(m, "CachePages").def("segment", &segment_of_pages, "index"_a);
  nb::enum_<Prefixes::Save>(m, "Save").value("leaving", Prefixes::Save::leaving).value("grown", Prefixes::Save::grown)
      .value("all", Prefixes::Save::all);
  decoder
      .def("new_pages", [](Decoder& d) { return CachePages(d.executor.kv()); },
           nb::keep_alive<0, 1>())
      .def_prop_ro("kv_layout", &layout)
      .def("set_saves", [](Decoder& d, bool saves) { d.schedule().prefixes().set_saves(saves); }, "saves"_a)
      .def_prop_ro("leaves", [](Decoder& d) { return d.schedule().prefixes().leaves(); })
      .def("begin_saving", &begin_saving, "what"_a)
      .def("segment", &segment_of_cache, "cache"_a, "index"_a)
      .def("finish_saving", [](Decoder& d, bool done) { return d.schedule().prefixes().finish_saving(done); }, "done"_a)
      .def("reusable", [](Decoder& d, const Ids& ids, int most) { return d.schedule().prefixes().reusable(ids, most); },
           "ids"_a, "max_reusable"_a)
      .def("start_in", &start_in, "dropped"_a, "shared"_a)
      .def("adopt", &adopt, "pages"_a, "ids"_a, "starts"_a, "dropped"_a);
}

}  // namespace laneformer
