-- Keeps what an image URL was found to hold.
-- KEYS: record, mark that it is fresh, claim. ARGV: record, its time to live (ms), for how long of that it is fresh (ms).
-- Returns {1}.
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if tonumber(ARGV[3]) > 0 then
  redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
else
  redis.call('DEL', KEYS[2])
end
return { 1 }
