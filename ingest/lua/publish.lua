-- Live events: SPUBLISH on a Cluster, where a message then stays at its shard's node.
local PUBLISH = 'PUBLISH'

-- Publishes ARGV[first...last], of which the first has number offset + 1; those up to seq are there already. Returns the
-- new seq.
local function publish(events, channel, seq, offset, first, last)
  for i = first + seq - offset, last do
    seq = seq + 1
    redis.call('XADD', events, seq .. '-0', 'e', ARGV[i])
    redis.call(PUBLISH, channel, seq .. ' ' .. ARGV[i])
  end
  return seq
end
